"""Stage 1: turn emoji vector art from npm packages into a captioned 128x128 image set.

Reads (downloads with ``npm pack`` when missing, into ``data/npm``):

* ``@iconify-json/noto``               Noto Emoji artwork          Apache-2.0
* ``@iconify-json/fluent-emoji-flat``  Fluent Emoji (flat) artwork MIT
* ``unicode-emoji-json``               names and groups            MIT
* ``emojilib``                         keywords                    MIT
* ``emojibase-data``                   CLDR tags                   MIT (data: Unicode licence)

Writes:

* ``data/images.npy``  uint8 [N, 128, 128, 3], white background
* ``data/meta.jsonl``  one record per image (same order): name, style, group, keywords, whether it may be mirrored
"""

import argparse
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import resvg_py
from PIL import Image

PACKAGES = {
    "@iconify-json/noto": "1.2.9",
    "@iconify-json/fluent-emoji-flat": "1.2.6",
    "unicode-emoji-json": "0.9.0",
    "emojilib": "4.0.3",
    "emojibase-data": "17.0.0",
}
STYLES = {"flat": "@iconify-json/fluent-emoji-flat", "noto": "@iconify-json/noto"}
SIZE = 128

# --- which emoji are kept -------------------------------------------------------------------------------------------
# Whole groups that are pictures of things.
GROUPS = (
    "Smileys & Emotion",
    "Animals & Nature",
    "Food & Drink",
    "Activities",
    "Objects",
    "Travel & Places",
    "People & Body",
    "Symbols",
    "Flags",
)
# Names (regular expression) that are dropped: text-like signs, clock faces, gendered duplicates, families, flags.
DROP = re.compile(
    r"keycap|button|o.clock|-thirty|^flag: |\b(wo)?m[ae]n\b|family|couple|kiss:|people|holding hands|"
    r"input |Japanese|arrow|trade mark|registered|copyright|squared|ATM|"
    r"\b(girl|boy|mrs|mx)\b|restroom|information|currency|dollar sign|exclamation|question|"
    r"^(dotted|curly loop|double curly|part alternation|wavy dash|hollow|multiply|plus|minus|divide|"
    r"heavy|infinity|fleur|trident|name badge|eight-|sparkle$|check mark|cross mark|baby symbol|wireless|"
    r"antenna|vibration|mobile phone off|transgender symbol|female sign|male sign|no one under|"
    r"non-potable|left luggage|customs|passport control|baggage claim|litter in bin|potable|"
    r"dim button|bright button|medical symbol|recycling|white large|white medium|white small|"
    r"black medium|black small|white circle|fingerprint|splatter|"
    r"star and crescent|om$|wheel of dharma|yin yang|latin cross|orthodox|menorah|khanda|place of worship|"
    r"atom symbol|star of David|peace symbol|diamond with a dot|Ophiuchus|Aries|Taurus|Gemini|Cancer|Leo|"
    r"Virgo|Libra|Scorpio|Sagittarius|Capricorn|Aquarius|Pisces)",
    re.I,
)
# Pictures that must not be mirrored (they contain letters, digits or a handed meaning).
NO_FLIP = re.compile(
    r"clock|calendar|left|right|\b(up|down)\b|medal|ABCD|100|hundred|SOON|abc|input|keyboard|newspaper|page|"
    r"book|medicine|passport|money|yen|euro|pound|dollar|card|chart|joker|mahjong|music|note|score|ticket|"
    r"label|bank|hotel|hospital|ATM|convenience|sign|OK|love hotel|8 ball|pool|slot|watch|timer|speech|zzz|"
    r"bubble|newspaper|memo|scroll|receipt|tear-off|identification|credit|postbox|no |prohibited|stop|bus stop|"
    r"police|taxi|ambulance|P$|shopping|post office|bookmark|envelope|package|game|dice|computer|desktop|"
    r"laptop|television|radio|thermometer|ruler|level|writing|pointing|thumbs|vulcan|love-you|horns|call me|"
    r"pinch|fist|hand|ear|palm|spiral|cyclone|guitar|violin|trumpet|saxophone|banjo|accordion|heart on|"
    r"heart with|fuel|gear|bullseye|oncoming|bitcoin|nose|tooth|anatomical|placard|symbols|rolled|sports medal",
    re.I,
)


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("’", "").replace("'", "")).strip("-")


def package(root: Path, name: str) -> Path:
    """The unpacked folder of an npm package, fetched with npm's own client if it is not there yet."""
    folder = root / name.strip("@").replace("/", "-")
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        tgz = subprocess.run(
            ["npm", "pack", f"{name}@{PACKAGES[name]}", "--silent"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()[-1]
        with tarfile.open(root / tgz) as tar:
            tar.extractall(root / "tmp", filter="data")
        (root / "tmp" / "package").rename(folder)
        (root / tgz).unlink()
    return folder


def keywords_of(name: str, *lists: list[str]) -> list[str]:
    """Lower-case keywords from several sources, without emoticons, repetitions and the name itself."""
    words = []
    for word in (w for words_ in lists for w in words_):
        word = word.replace("_", " ").lower().strip()
        if re.fullmatch(r"[a-z][a-z' -]{1,24}", word) and word != name.lower() and word not in words:
            words.append(word)
    return words


def render(icons: dict, key: str, scale: float) -> np.ndarray | None:
    """Rasterise one Iconify icon on a white 128x128 canvas, its box scaled to ``scale`` of the canvas."""
    seen = set()
    while key in icons.get("aliases", {}) and key not in icons["icons"]:
        if key in seen:
            return None
        seen.add(key)
        key = icons["aliases"][key]["parent"]
    icon = icons["icons"].get(key)
    if icon is None:
        return None
    w = icon.get("width", icons.get("width", icons.get("height", 16)))
    h = icon.get("height", icons.get("height", 16))
    left, top = icon.get("left", 0), icon.get("top", 0)
    side = max(w, h) / scale
    box = (left + w / 2 - side / 2, top + h / 2 - side / 2, side, side)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{SIZE}" height="{SIZE}" viewBox="{box[0]} {box[1]} {box[2]} {box[3]}">{icon["body"]}</svg>'
    )
    # 3x supersampling, then a box filter: clean edges
    png = bytes(
        resvg_py.svg_to_bytes(
            svg_string=svg, background="white", width=SIZE * 3, height=SIZE * 3, skip_system_fonts=True
        )
    )
    image = Image.open(io.BytesIO(png)).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BOX)
    return np.asarray(image)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    args = ap.parse_args()
    npm = args.data / "npm"

    emoji = json.loads((package(npm, "unicode-emoji-json") / "data-by-emoji.json").read_text())
    keywords = json.loads(next(package(npm, "emojilib").rglob("emoji-en-US.json")).read_text())
    tags = {
        e["unicode"].replace("\ufe0f", ""): e.get("tags", [])
        for e in json.loads((package(npm, "emojibase-data") / "en" / "compact.json").read_text())
    }
    sets = {style: json.loads((package(npm, pkg) / "icons.json").read_text()) for style, pkg in STYLES.items()}

    images, records, concepts = [], [], set()
    for char, info in emoji.items():
        name = info["name"]
        if info["group"] not in GROUPS or DROP.search(name):
            continue
        words = keywords_of(name, tags.get(char.replace("\ufe0f", ""), []), keywords.get(char, []))
        for style, icons in sets.items():
            image = render(icons, slug(name), scale=0.94)
            if image is None or image.min() > 240:
                continue
            concepts.add(name)
            images.append(image)
            records.append(
                {
                    "char": char,
                    "name": name.lower().replace("’", "'").replace("“", "").replace("”", ""),
                    "style": style,
                    "group": info["group"],
                    "keywords": words,
                    "flip": not NO_FLIP.search(name),
                }
            )
    args.data.mkdir(parents=True, exist_ok=True)
    np.save(args.data / "images.npy", np.stack(images))
    with open(args.data / "meta.jsonl", "w") as f:
        for record in records:
            f.write(json.dumps(record, ensure_ascii=False) + "\n")
    by_style = {s: sum(r["style"] == s for r in records) for s in STYLES}
    print(
        f"{len(images)} images of {len(concepts)} concepts {by_style}, "
        f"{sum(r['flip'] for r in records)} may be mirrored"
    )


if __name__ == "__main__":
    main()
