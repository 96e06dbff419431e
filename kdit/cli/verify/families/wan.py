"""How the reference library's Wan pipelines are called, in kdit's words. Found by name through call_mapping.py."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kdit.cli.verify.call_mapping import CallMapping, Pair, Request, repeated, seed_and_noise
from kdit.cli.verify.case import CallReader, Case
from kdit.config import RuntimeConfig, SampleConfig
from kdit.errors import InputError
from kdit.keys import TensorKey
from kdit.pipelines.context_builders.wan import WanI2VExtraInputs

# What the pipelines' __call__ takes for an argument that is not given.
WIDTH, HEIGHT, FRAMES, STEPS, GUIDANCE, TEXT_LENGTH = 832, 480, 81, 50, 5.0, 512
CALL = "denoiser.transformer.call{}."


class WanCallMapping(CallMapping):
    """Guidance branches are separate calls of the denoiser, the conditional one first."""

    def request(self, case: Case, transformer: Mapping[str, object]) -> Request:
        """See CallMapping. Without guidance the reference ignores a negative prompt and the second expert's scale."""
        call = CallReader(case)
        copies = call.whole("num_videos_per_prompt", 1)
        prompt, negative = (repeated(call.texts(key), copies) for key in ("prompt", "negative_prompt"))
        if prompt is None:
            raise InputError(f"{case.where}: the call has no prompt")
        if copies > 1 and isinstance(prompt, str):
            prompt = [prompt] * copies
        cfg_scale = call.number("guidance_scale", GUIDANCE)
        second = call.number("guidance_scale_2", cfg_scale) if "guidance_scale_2" in case.call else None
        if cfg_scale <= 1:
            negative, second = None, None
        seed, feeds = seed_and_noise(call, 1 if isinstance(prompt, str) else len(prompt))
        extra = WanI2VExtraInputs(start_img_path=call.images("image"), end_img_path=call.images("last_image"))
        request = Request(
            prompt=prompt,
            prompt_negative=negative,
            sample_config=SampleConfig(
                steps=call.whole("num_inference_steps", STEPS),
                max_sequence_length=call.whole("max_sequence_length", TEXT_LENGTH),
                cfg_scale=cfg_scale,
                cfg_scale_2=second,
            ),
            runtime_config=RuntimeConfig(
                size=(call.whole("width", WIDTH), call.whole("height", HEIGHT)),
                frame_num=call.whole("num_frames", FRAMES),
                seed=seed,
            ),
            extra_inputs=extra if extra.given() else None,
            feeds=feeds,
        )
        call.finish()
        return request

    def embeddings(self, case: Case, request: Request) -> Mapping[TensorKey, list[Pair]]:
        """UMT5 states [B, L, D] of each branch; those of the second are not recorded if they are large."""
        found = {}
        for i, key in enumerate(_branches(request)):
            name = CALL.format(i) + "in.encoder_hidden_states"
            if i == 0 or name in case.tensors:
                found[key] = [(f"{key.value} text", case.tensor(name))]
        return found

    def initial_latents(self, case: Case) -> Tensor:
        """Latents [B, C, F, H, W]; encoded frames and their mask come behind them."""
        return case.tensor(CALL.format(0) + "in.hidden_states")[:, : case.tensor("latents").shape[1]]

    def first_outputs(self, case: Case, request: Request) -> list[Pair]:
        """Calls 0 and 1."""
        return [(key.value, case.tensor(CALL.format(i) + "out")) for i, key in enumerate(_branches(request))]

    def denoiser_calls(self, request: Request, num_steps: int) -> Mapping[str, int]:
        """One call per step and branch."""
        return {"transformer": num_steps * len(_branches(request))}


def _branches(request: Request) -> tuple[TensorKey, ...]:
    assert request.sample_config.cfg_scale is not None
    keys = (TensorKey.POSITIVE, TensorKey.NEGATIVE)
    return keys if request.sample_config.cfg_scale > 1 else keys[:1]


MAPPING = WanCallMapping()
