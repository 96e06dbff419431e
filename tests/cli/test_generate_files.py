"""Files of `kdit generate`, in and out: their sizes and modes, masks, one input per prompt."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from kdit.cli.main import app
from kdit.media.metadata import read_settings

RUN = CliRunner()
ReferenceFamily = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: object) -> Result:
    return RUN.invoke(app, ["generate", *map(str, arguments), "--device", "cpu"])


def generate(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


# ---- sizes and pictures


@pytest.mark.parametrize(("size", "fit"), [("17x31", "crop"), ("120x68", "pad"), ("120x68", "crop")])
def test_a_file_has_the_size_that_was_asked_for_and_is_stated(size: str, fit: str) -> None:
    generate("heart", "--size", size, "--fit", fit, "--steps", "1", "-o", "a.png")
    with Image.open("a.png") as image:
        assert f"{image.width}x{image.height}" == size
        assert read_settings("a.png")["size"] == [image.width, image.height]


def half_transparent(mode: str) -> Image.Image:
    """Left half transparent, right half teal or grey; opaque where ``mode`` has no alpha."""
    image = Image.new("RGBA", (48, 32), (200, 30, 30, 0))
    image.paste((60, 120, 120, 255), (24, 0, 48, 32))
    if mode == "P":
        palette = Image.new("P", (48, 32), 0)
        palette.putpalette([200, 30, 30, 60, 120, 120])
        palette.paste(1, (24, 0, 48, 32))
        palette.info["transparency"] = 0
        return palette
    return image.convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "CMYK"])
def test_a_picture_of_any_mode_is_changed_as_what_it_shows(reference_family: ReferenceFamily, mode: str) -> None:
    own = half_transparent(mode)
    own.save("in.tif" if mode == "CMYK" else "in.png")
    white = Image.new("RGBA", own.size, "white")
    shown = Image.alpha_composite(white, own.convert("RGBA")) if mode in ("RGBA", "LA", "P") else own
    shown.convert("RGB").save("shown.png")
    request = ["a", "--model", reference_family("flux_dev") / "model", "--steps", "2", "--seed", "1"]
    (name,) = [name for name in os.listdir() if name.startswith("in.")]
    for strength in ("0", "0.6"):
        for source, output in ((name, "a.png"), ("shown.png", "b.png")):
            generate(*request, "--image", source, "--strength", strength, "-o", output)
        with Image.open("a.png") as a, Image.open("b.png") as b, Image.open("shown.png") as seen:
            assert a.tobytes() == b.tobytes() and (strength != "0" or a.tobytes() == seen.tobytes())


@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_a_photo_is_upright_as_picture_and_as_mask(reference_family: ReferenceFamily, orientation: int) -> None:
    upright = Image.new("L", (64, 32), "black")
    upright.paste(255, (0, 0, 32, 16))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's number of the turn that a viewer undoes
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save("mask.jpg", quality=100, exif=exif)
    stored.convert("RGB").save("photo.jpg", quality=100, exif=exif)
    upright.save("upright.png")
    request = [
        "a",
        "--model",
        reference_family("flux_fill") / "model",
        "--steps",
        "1",
        "--seed",
        "1",
        "--extra",
        "composite=true",
    ]
    generate(*request, "--image", "photo.jpg", "--mask", "mask.jpg", "-o", "a.jpg", "--quality", "100")
    generate(*request, "--image", "upright.png", "--mask", "upright.png", "-o", "b.png")
    with Image.open("a.jpg") as a, Image.open("b.png") as b:
        assert a.size == b.size == (64, 32) and 0x0112 not in a.getexif()
        pair = [torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float() for image in (a, b)]
    assert (pair[0] - pair[1]).abs().mean() < 4  # what two JPEGs change


def test_outside_the_mask_every_pixel_is_the_inputs_own(reference_family: ReferenceFamily) -> None:
    noise = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(noise.numpy()).save("in.png")
    Image.new("L", (64, 64)).save("black.png")
    hole = Image.new("L", (64, 64))
    hole.paste(255, (24, 24, 32, 32))
    hole.save("hole.png")
    request = [
        "a",
        "--model",
        reference_family("flux_fill") / "model",
        "--steps",
        "2",
        "--seed",
        "1",
        "--image",
        "in.png",
    ]
    made = {}
    for mask, composite in (("black", True), ("hole", True), ("hole", False)):
        more = ["--extra", "composite=true"] if composite else []
        generate(*request, "--mask", f"{mask}.png", *more, "-o", "out.png")
        with Image.open("out.png") as image:
            made[mask, composite] = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(64, 64, 3)
    assert torch.equal(made["black", True], noise)
    changed = (made["hole", True] != noise).any(-1)
    assert changed[24:32, 24:32].any() and int(changed.sum()) == int(changed[24:32, 24:32].sum())
    assert torch.equal(made["hole", True][24:32, 24:32], made["hole", False][24:32, 24:32])
    assert (made["hole", False] != noise).any(-1).float().mean() > 0.5  # the autoencoder alone changes the rest


# ---- several results


def test_a_picture_per_prompt_serves_all_results_of_that_prompt(reference_family: ReferenceFamily) -> None:
    model = reference_family("flux_dev") / "model"
    for name, colour in (("a.png", "teal"), ("b.png", "red"), ("c.png", "blue")):
        Image.new("RGB", (32, 32), colour).save(name)
    options = ["--model", model, "--steps", "2", "--strength", "0.5", "--batch-invariant"]
    files = ["--image", "a.png", "--image", "b.png"]
    generate("fox", "boat", *files, "--num", "2", "--seed", "1", *options, "-o", "p.png")
    told = [read_settings(f"p-{i}.png") for i in range(4)]
    assert [(own["prompt"], own["seed"], own["extra_inputs"]) for own in told] == [
        (prompt, seed, {"image_path": name})
        for prompt, seed, name in (("fox", 1, "a.png"), ("fox", 2, "a.png"), ("boat", 3, "b.png"), ("boat", 4, "b.png"))
    ]
    generate("boat", "--image", "b.png", "--seed", "4", *options, "-o", "alone.png")
    with Image.open("alone.png") as alone, Image.open("p-3.png") as member:
        assert alone.tobytes() == member.tobytes()
    generate("--from", "p-3.png", "-o", "again.png")
    assert Path("again.png").read_bytes() == Path("p-3.png").read_bytes()
    generate("--from", "p-3.png", "--image", "c.png", "-o", "other.png")
    assert read_settings("other.png")["media"] == {"images": ["c.png"]}
    generate("fox", *files, "--num", "2", *options, "-o", "q.png")  # as many pictures as results: one for each
    assert [read_settings(f"q-{i}.png")["extra_inputs"] for i in range(2)] == [
        {"image_path": "a.png"},
        {"image_path": "b.png"},
    ]
    refused = run("fox", "boat", "cat", *files, "--num", "2", *options, "-o", "r.png")
    assert refused.exit_code == 2 and "--image has 2 entries for 6 prompts" in refused.stderr


def test_references_for_every_prompt_stay_so(reference_family: ReferenceFamily) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (32, 32), "teal").save(name)
    options = ["--model", reference_family("flux_kontext") / "model", "--steps", "1", "--extra", "auto_resize=false"]
    generate("x", "y", "--image", "a.png", "--image", "b.png", "--num", "2", *options, "--size", "32x32", "-o", "p.png")
    assert {str(read_settings(f"p-{i}.png")["extra_inputs"]) for i in range(4)} == {
        str({"image_paths": ["a.png", "b.png"], "auto_resize": False})
    }


def test_latents_of_a_batch_carry_their_own_inputs(reference_family: ReferenceFamily) -> None:
    for name, colour in (("a.png", "teal"), ("b.png", "red")):
        Image.new("RGB", (32, 32), colour).save(name)
    options = ["--model", reference_family("flux_dev") / "model", "--steps", "2", "--seed", "1", "--batch-invariant"]
    generate("fox", "boat", "--image", "a.png", "--image", "b.png", *options, "-o", "p.safetensors")
    told = read_settings("p-1.safetensors")
    assert (told["prompt"], told["seed"], told["extra_inputs"]) == ("boat", 2, {"image_path": "b.png"})
    generate("--from", "p-1.safetensors", "-o", "again.safetensors")
    assert Path("again.safetensors").read_bytes() == Path("p-1.safetensors").read_bytes()
