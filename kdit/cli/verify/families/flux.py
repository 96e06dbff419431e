"""How the reference library's FluxPipeline is called, in kdit's words. Found by name through call_mapping.py."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kdit.cli.verify.call_mapping import CallMapping, Pair, Request, repeated, seed_and_noise
from kdit.cli.verify.case import CallReader, Case
from kdit.config import RuntimeConfig, SampleConfig
from kdit.errors import InputError
from kdit.keys import TensorKey
from kdit.pipelines.context_builders.flux import FluxExtraInputs

# What FluxPipeline.__call__ takes for an argument that is not given.
SIDE, STEPS, TEXT_LENGTH, GUIDANCE, NO_CFG = 1024, 28, 512, 3.5, 1.0


class FluxCallMapping(CallMapping):
    """One denoiser; guidance branches are separate calls, the conditional one first."""

    def request(self, case: Case, transformer: Mapping[str, object]) -> Request:
        """See CallMapping. The reference ignores guidance_scale without an embedding, and a negative prompt
        unless true_cfg_scale is above 1; kdit refuses or warns, so neither is passed on then.
        """
        call = CallReader(case)
        copies = call.whole("num_images_per_prompt", 1)
        prompt, prompt_2, negative, negative_2 = (
            repeated(call.texts(key), copies) for key in ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")
        )
        if prompt is None:
            raise InputError(f"{case.where}: the call has no prompt")
        if copies > 1 and isinstance(prompt, str):
            prompt = [prompt] * copies
        cfg_scale = call.number("true_cfg_scale", NO_CFG)
        guidance = call.number("guidance_scale", GUIDANCE)
        if negative is None or cfg_scale <= 1:
            negative, negative_2, cfg_scale = None, None, NO_CFG
        seed, feeds = seed_and_noise(call, 1 if isinstance(prompt, str) else len(prompt))
        width, height = call.whole("width", SIDE), call.whole("height", SIDE)
        request = Request(
            prompt=prompt,
            prompt_negative=negative,
            sample_config=SampleConfig(
                steps=call.whole("num_inference_steps", STEPS),
                max_sequence_length=call.whole("max_sequence_length", TEXT_LENGTH),
                guidance_scale=guidance if transformer.get("guidance_embeds") else None,
                cfg_scale=cfg_scale,
            ),
            runtime_config=RuntimeConfig(size=(width, height), seed=seed),
            extra_inputs=_extra_inputs(prompt_2, negative_2),
            feeds=feeds,
        )
        call.finish()
        return request

    def embeddings(self, case: Case, request: Request) -> Mapping[TensorKey, list[Pair]]:
        """T5 embeddings [B, L, D] and CLIP's pooled output [B, Dp] of each branch."""
        keys = [TensorKey.POSITIVE] if request.prompt_negative is None else [TensorKey.POSITIVE, TensorKey.NEGATIVE]
        return {
            key: [
                (f"{key.value} {name}", case.tensor(f"denoiser.transformer.call{i}.in.{argument}"))
                for name, argument in (("T5", "encoder_hidden_states"), ("CLIP", "pooled_projections"))
            ]
            for i, key in enumerate(keys)
        }

    def initial_latents(self, case: Case) -> Tensor:
        """Packed latents [B, L, 4C]."""
        return case.tensor("denoiser.transformer.call0.in.hidden_states")

    def first_outputs(self, case: Case, request: Request) -> list[Pair]:
        """Call 0 is the conditional pass, call 1 the unconditional one."""
        names = ["positive"] if request.prompt_negative is None else ["positive", "negative"]
        return [(name, case.tensor(f"denoiser.transformer.call{i}.out")) for i, name in enumerate(names)]

    def denoiser_calls(self, request: Request, num_steps: int) -> Mapping[str, int]:
        """One call per step and branch."""
        return {"transformer": num_steps * (1 if request.prompt_negative is None else 2)}


def _extra_inputs(prompt_2: str | list[str] | None, negative_2: str | list[str] | None) -> FluxExtraInputs | None:
    if prompt_2 is None and negative_2 is None:
        return None
    return FluxExtraInputs(prompt_2=prompt_2, negative_prompt_2=negative_2)


MAPPING = FluxCallMapping()
