"""Stage 4: assemble a standard FluxPipeline folder from the checkpoints (averaged weights, bf16 safetensors).

python export.py                       # -> ../kdit/data/mini, the built-in model
python export.py --out DIR             # -> a copy elsewhere
"""

import argparse
import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
from transformers import CLIPTokenizer, T5TokenizerFast

from model import TextToLatent
from train_vae import VAE_CONFIG

HERE = Path(__file__).resolve().parent
BUILT_IN = HERE.parent / "kdit" / "data" / "mini"


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--checkpoints", type=Path, default=HERE / "checkpoints")
    ap.add_argument("--out", type=Path, default=BUILT_IN)
    ap.add_argument("--vae", type=Path, help="VAE checkpoint, if not the one in --checkpoints")
    ap.add_argument("--weights", choices=["ema", "master"], default="ema")
    ap.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    ap.add_argument("--version", help="version of a newly trained model, written to kdit.json")
    args = ap.parse_args()
    dtype = getattr(torch, args.dtype)

    state = torch.load(args.checkpoints / "dit.pt", weights_only=True)
    model = TextToLatent()
    model.load_state_dict({n: t.float() for n, t in state["optimizer"][args.weights].items()}, strict=False)
    missing = set(dict(model.named_parameters())) - set(state["optimizer"][args.weights])
    assert not missing, missing
    vae = AutoencoderKL(**{**VAE_CONFIG, "scaling_factor": state["scale"], "shift_factor": state["shift"]})
    vae.load_state_dict(torch.load(args.vae or args.checkpoints / "vae.pt", weights_only=True)["model"])
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0, use_dynamic_shifting=False),
        vae=vae.to(dtype),
        transformer=model.transformer.to(dtype),
        text_encoder=model.text_encoder.to(dtype),
        text_encoder_2=model.text_encoder_2.to(dtype),
        tokenizer=CLIPTokenizer.from_pretrained(args.checkpoints / "tokenizer"),
        tokenizer_2=T5TokenizerFast.from_pretrained(args.checkpoints / "tokenizer_2"),
    )
    pipe.save_pretrained(args.out)
    # diffusers loads in fp32 unless told otherwise, transformers in the dtype of the config: make them agree
    for folder in ("text_encoder", "text_encoder_2"):
        config = json.loads((args.out / folder / "config.json").read_text())
        config["dtype"] = "float32"
        (args.out / folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # The classic files of the CLIP tokenizer too, for readers that do not know tokenizer.json. T5's spiece.model
    # stays behind: it splits words otherwise than the tokenizer.json that the model was trained with.
    for name in ("vocab.json", "merges.txt"):
        (args.out / "tokenizer" / name).write_bytes((args.checkpoints / "tokenizer" / name).read_bytes())
    # what a pipeline folder cannot state, and what must go with every copy
    info = json.loads((BUILT_IN / "kdit.json").read_text())
    info["version"] = args.version or info["version"]
    attribution = (BUILT_IN / "ATTRIBUTION.md").read_text()
    (args.out / "kdit.json").write_text(json.dumps(info, indent=2) + "\n")
    (args.out / "ATTRIBUTION.md").write_text(attribution)
    size = sum(f.stat().st_size for f in args.out.rglob("*") if f.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB, step {state['optimizer']['steps']}, {state['seen']} samples seen")


if __name__ == "__main__":
    main()
