"""Sample the built-in model with diffusers' own FluxPipeline and lay the pictures out on one sheet.

python sample.py                                     # the standard prompts -> samples.png
python sample.py --prompt "red heart" --out heart.png
"""

import argparse
import time
from pathlib import Path

import torch
from diffusers import FluxPipeline
from PIL import Image, ImageDraw

HERE = Path(__file__).resolve().parent
BUILT_IN = HERE.parent / "kdit" / "data" / "mini"
PROMPTS = (
    "a smiling cat face",
    "red heart",
    "pizza slice",
    "rocket",
    "dog face",
    "panda",
    "red apple",
    "strawberry",
    "hamburger",
    "birthday cake",
    "soccer ball",
    "guitar",
    "sunflower",
    "cactus",
    "evergreen tree",
    "octopus",
    "butterfly",
    "red car",
    "airplane",
    "house",
    "smiling face with sunglasses",
    "ghost",
    "crown",
    "blue book",
)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", type=Path, default=BUILT_IN)
    ap.add_argument("--prompt", action="append", help="may be repeated; default: the standard prompts")
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--cfg", type=float, default=3.5)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--tokens", type=int, default=16, help="max_sequence_length (16 to 32)")
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--columns", type=int, default=8)
    ap.add_argument("--out", type=Path, default=HERE / "samples.png")
    args = ap.parse_args()
    prompts = args.prompt or PROMPTS
    pipe = FluxPipeline.from_pretrained(args.model, torch_dtype=getattr(torch, args.dtype))
    pipe.set_progress_bar_config(disable=True)
    images, began = [], time.time()
    for prompt in prompts:
        images += pipe(
            prompt,
            negative_prompt="",
            true_cfg_scale=args.cfg,
            num_inference_steps=args.steps,
            height=128,
            width=128,
            max_sequence_length=args.tokens,
            generator=torch.Generator().manual_seed(args.seed),
        ).images
    print(f"{(time.time() - began) / len(prompts):.2f} s a picture")
    columns = min(args.columns, len(images))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * 136, rows * 152), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
        x, y = i % columns * 136, i // columns * 152
        sheet.paste(image, (x + 4, y + 4))
        draw.text((x + 4, y + 134), prompt[:22], fill="black")
    sheet.save(args.out)


if __name__ == "__main__":
    main()
