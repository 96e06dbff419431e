"""Times the denoising loop of kdit against diffusers' own pipeline: same weights, dtype, threads and noise.

    python benchmarks/denoise_loop.py --model mini --steps 24 --threads 2 --rounds 7

The two alternate within one run. Both start from the same prompt embeddings and end at the latents, so text
encoding and decoding are left out; kdit's share includes its preparation (modulation tables, rotary tables).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable

import torch

from kdit import ExecuteConfig, Pipeline, RuntimeConfig, SampleConfig, TensorKey

warnings.filterwarnings("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--prompt", default="a red heart")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--cfg", type=float, default=3.5)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--text-tokens", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    pipe = Pipeline.from_models(args.model, execute_config=ExecuteConfig(dtype=args.dtype))
    sample = SampleConfig(steps=args.steps, cfg_scale=args.cfg, max_sequence_length=args.text_tokens)
    runtime = RuntimeConfig(seed=0, size=(args.size, args.size), output_type="latents")
    hold = (TensorKey.POSITIVE, TensorKey.NEGATIVE)
    request = pipe.request(args.prompt, sample_config=sample, runtime_config=runtime)
    with pipe.begin(request, hold=hold) as run:
        embeddings = {key: run.fetch(key) for key in hold}

    def kdit() -> torch.Tensor:
        return pipe.generate(args.prompt, sample_config=sample, runtime_config=runtime, feeds=embeddings).latents

    ours, theirs, ratios = [], [], []
    diffusers = reference(pipe, args, embeddings)
    kdit_latents, reference_latents = kdit(), diffusers()  # warm-up, and a check that both do the same work
    error = float((kdit_latents - reference_latents).norm() / reference_latents.norm())
    for i in range(args.rounds):
        pair = {}
        for name, call in (
            (("kdit", kdit), ("diffusers", diffusers)) if i % 2 else (("diffusers", diffusers), ("kdit", kdit))
        ):
            pair[name] = timed(call)
        ours.append(pair["kdit"])
        theirs.append(pair["diffusers"])
        ratios.append(pair["diffusers"] / pair["kdit"])
    print(
        json.dumps(
            {
                "kdit_seconds": round(statistics.median(ours), 4),
                "diffusers_seconds": round(statistics.median(theirs), 4),
                "speedup_median": round(statistics.median(ratios), 3),
                "speedup_min_max": [round(min(ratios), 3), round(max(ratios), 3)],
                "latents_relative_error": error,
                "settings": vars(args),
                "torch": torch.__version__,
            },
            indent=1,
        )
    )


def timed(call: Callable[[], torch.Tensor]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def reference(
    pipe: Pipeline, args: argparse.Namespace, embeddings: dict[TensorKey, torch.Tensor | list[torch.Tensor]]
) -> Callable[[], torch.Tensor]:
    """diffusers' pipeline on the same folder, from the same embeddings."""
    from diffusers import FluxPipeline

    dtype = getattr(torch, args.dtype)
    reference = FluxPipeline.from_pretrained(str(pipe.checkpoint.path), torch_dtype=dtype)
    reference.set_progress_bar_config(disable=True)
    (text, pooled), (negative_text, negative_pooled) = (
        embeddings[key] for key in (TensorKey.POSITIVE, TensorKey.NEGATIVE)
    )

    def call() -> torch.Tensor:
        return reference(
            prompt_embeds=text,
            pooled_prompt_embeds=pooled,
            negative_prompt_embeds=negative_text,
            negative_pooled_prompt_embeds=negative_pooled,
            true_cfg_scale=args.cfg,
            num_inference_steps=args.steps,
            height=args.size,
            width=args.size,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).images

    return call


if __name__ == "__main__":
    main()
