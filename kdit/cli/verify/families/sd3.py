"""How the reference library's StableDiffusion3Pipeline and its Img2Img are called. Found through call_mapping.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kdit.cli.verify.call_mapping import CallMapping, Pair, Request, repeated, seed_and_noise
from kdit.cli.verify.case import CallReader, Case
from kdit.config import RuntimeConfig, SampleConfig
from kdit.errors import InputError
from kdit.keys import TensorKey
from kdit.models.sd3.text import join_clip, join_text
from kdit.pipelines.context_builders.sd3 import SD3ExtraInputs

# What the pipelines' __call__ takes for an argument that is not given.
SIDE, TEXT_LENGTH, GUIDANCE = 128 * 8, 256, 7.0
STEPS, STEPS_FROM_IMAGE, STRENGTH = 28, 50, 0.6
SKIP_SCALE, SKIP_START, SKIP_STOP = 2.8, 0.01, 0.2
TEXTS = ("prompt_2", "prompt_3", "negative_prompt_2", "negative_prompt_3")


class SD3CallMapping(CallMapping):
    """One denoiser, called with both guidance branches at once, the unconditional one first."""

    def request(self, case: Case, transformer: Mapping[str, object]) -> Request:
        """See CallMapping. Without guidance the reference ignores negative prompts and skipped layers; kdit refuses
        or warns, so they are not passed on then.
        """
        call = CallReader(case)
        copies = call.whole("num_images_per_prompt", 1)
        prompt, negative = (repeated(call.texts(key), copies) for key in ("prompt", "negative_prompt"))
        if prompt is None:
            raise InputError(f"{case.where}: the call has no prompt")
        if copies > 1 and isinstance(prompt, str):
            prompt = [prompt] * copies
        num_samples = 1 if isinstance(prompt, str) else len(prompt)
        cfg_scale = call.number("guidance_scale", GUIDANCE)
        if cfg_scale <= 1:
            negative = None
        extra = _extra_inputs(call, copies, guided=cfg_scale > 1)
        seed, feeds = seed_and_noise(call, num_samples)
        image = extra.image_path
        if image is not None and seed is None:
            feeds = {**(feeds or {}), TensorKey.POSTERIOR_NOISE: _posterior_draw(case)}
        strength = call.number("strength", STRENGTH)
        request = Request(
            prompt=prompt,
            prompt_negative=negative,
            sample_config=SampleConfig(
                steps=call.whole("num_inference_steps", STEPS if image is None else STEPS_FROM_IMAGE),
                max_sequence_length=call.whole("max_sequence_length", TEXT_LENGTH),
                cfg_scale=cfg_scale,
                strength=None if image is None else strength,
            ),
            runtime_config=RuntimeConfig(size=(call.whole("width", SIDE), call.whole("height", SIDE)), seed=seed),
            extra_inputs=extra if extra.given() else None,
            feeds=feeds,
        )
        call.finish()
        return request

    def embeddings(self, case: Case, request: Request) -> Mapping[TensorKey, list[Pair]]:
        """Text [B, L, D] and pooled text [B, Dp] of each branch."""
        recorded = [
            (name, _branches(case.tensor(f"denoiser.transformer.call0.in.{argument}"), request))
            for name, argument in (("text", "encoder_hidden_states"), ("pooled text", "pooled_projections"))
        ]
        return {key: [(f"{key.value} {name}", branches[key]) for name, branches in recorded] for key in recorded[0][1]}

    def joined(self, encoded: list[Tensor], recorded: list[Pair]) -> list[Tensor]:
        """The encoders' outputs as one text and one pooled text; without T5 zeros stand in its place."""
        clip, pooled = join_clip(encoded[:4])
        shape = recorded[0][1].shape
        t5 = encoded[4] if len(encoded) == 5 else torch.zeros(shape[0], shape[1] - clip.shape[1], shape[2])
        return [join_text(clip, t5), pooled]

    def initial_latents(self, case: Case) -> Tensor:
        """Latents [B, C, H, W]; with guidance they were given twice."""
        return case.tensor("denoiser.transformer.call0.in.hidden_states")[: case.tensor("latents").shape[0]]

    def first_outputs(self, case: Case, request: Request) -> list[Pair]:
        """Both halves of call 0."""
        branches = _branches(case.tensor("denoiser.transformer.call0.out"), request)
        return [(key.value, tensor) for key, tensor in branches.items()]

    def denoiser_calls(self, request: Request, num_steps: int) -> Mapping[str, int]:
        """One call per step, and one more in a step that skips layers."""
        extra = request.extra_inputs
        more = 0
        if isinstance(extra, SD3ExtraInputs) and extra.skip_layers:
            first, last = num_steps * extra.skip_layer_start, num_steps * extra.skip_layer_stop
            more = sum(first < i < last for i in range(num_steps))
        return {"transformer": num_steps + more}


def _branches(rows: Tensor, request: Request) -> dict[TensorKey, Tensor]:
    """Recorded rows [branches B, ...] by branch, as kdit orders them: the positive first."""
    assert request.sample_config.cfg_scale is not None
    if request.sample_config.cfg_scale <= 1:
        return {TensorKey.POSITIVE: rows}
    negative, positive = rows.chunk(2)
    return {TensorKey.POSITIVE: positive, TensorKey.NEGATIVE: negative}


def _extra_inputs(call: CallReader, copies: int, *, guided: bool) -> SD3ExtraInputs:
    """The further texts (the reference takes an empty one for none), the image, and what guidance needs."""
    prompt_2, prompt_3, negative_2, negative_3 = (repeated(call.texts(key), copies) or None for key in TEXTS)
    layers = call.take("skip_guidance_layers")
    scale = call.number("skip_layer_guidance_scale", SKIP_SCALE)
    start = call.number("skip_layer_guidance_start", SKIP_START)
    stop = call.number("skip_layer_guidance_stop", SKIP_STOP)
    extra = SD3ExtraInputs(prompt_2=prompt_2, prompt_3=prompt_3, image_path=call.images("image"))
    if not guided:
        return extra
    extra = replace(extra, negative_prompt_2=negative_2, negative_prompt_3=negative_3)
    if not layers:
        return extra
    if not isinstance(layers, list) or not all(isinstance(n, int) for n in layers):
        raise InputError(f"{call.case.where}: argument skip_guidance_layers must be a list of whole numbers")
    return replace(
        extra, skip_layers=tuple(layers), skip_layer_scale=scale, skip_layer_start=start, skip_layer_stop=stop
    )


def _posterior_draw(case: Case) -> Tensor:
    """The draw of the autoencoder, where several samples were drawn from one generator."""
    draws = [draw for draw in case.draws if draw["by"] == "vae"]
    if len(draws) != 1:
        raise InputError(f"{case.where}: expected one recorded draw of the autoencoder, got {len(draws)}")
    return case.tensor(str(draws[0]["key"]))


MAPPING = SD3CallMapping()
