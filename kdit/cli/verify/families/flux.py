"""How the reference library's FLUX.1 pipelines are called, in kdit's words. Found by name through call_mapping.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kdit.cli.verify.call_mapping import CallMapping, Pair, Request, repeated, seed_and_noise
from kdit.cli.verify.case import CallReader, Case
from kdit.config import RuntimeConfig, SampleConfig
from kdit.errors import InputError
from kdit.keys import TensorKey
from kdit.pipelines.context_builders.flux import (
    FluxControlExtraInputs,
    FluxExtraInputs,
    FluxFillExtraInputs,
    FluxKontextExtraInputs,
    FluxTextInputs,
)
from kdit.pipelines.image_sizes import MEGAPIXEL, size_of_area

# What the pipelines take for an argument that is not given.
SIDE, TEXT_LENGTH, NO_CFG = 1024, 512, 1.0
KONTEXT_MULTIPLE = 16  # pixels that one token of FLUX.1 stands for, along each side

Texts = str | list[str] | None
Size = tuple[int, int]


@dataclass(frozen=True)
class _Defaults:
    """Of one class of the reference."""

    steps: int = 28
    guidance: float = 3.5
    strength: float | None = None  # None: it has no such argument


@dataclass(frozen=True)
class _Inputs:
    """What a class takes beside texts."""

    extra: FluxTextInputs
    size: Size


def _text_to_image(call: CallReader, size: Size, prompt_2: Texts, negative_2: Texts) -> _Inputs:
    return _Inputs(FluxExtraInputs(prompt_2=prompt_2, negative_prompt_2=negative_2), size)


def _image_to_image(call: CallReader, size: Size, prompt_2: Texts, negative_2: Texts) -> _Inputs:
    image = call.images("image")
    return _Inputs(FluxExtraInputs(prompt_2=prompt_2, negative_prompt_2=negative_2, image_path=image), size)


def _fill(call: CallReader, size: Size, prompt_2: Texts, negative_2: Texts) -> _Inputs:
    image, mask = call.images("image"), call.images("mask_image")
    return _Inputs(FluxFillExtraInputs(prompt_2=prompt_2, image_path=image, mask_path=mask), size)


def _control(call: CallReader, size: Size, prompt_2: Texts, negative_2: Texts) -> _Inputs:
    return _Inputs(FluxControlExtraInputs(prompt_2=prompt_2, control_path=call.images("control_image")), size)


def _kontext(call: CallReader, size: Size, prompt_2: Texts, negative_2: Texts) -> _Inputs:
    """The reference brings the size that is asked for to an area; kdit makes what is asked for."""
    images = call.images("image")
    if isinstance(images, list):
        raise InputError(f"{call.case.where}: a list of images is a batch of pictures resized to the first one's size")
    width, height = size
    extra = FluxKontextExtraInputs(
        prompt_2=prompt_2, negative_prompt_2=negative_2, image_paths=images, auto_resize=call.flag("_auto_resize", True)
    )
    area = call.whole("max_area", MEGAPIXEL)
    return _Inputs(extra, size_of_area(width / height, area, KONTEXT_MULTIPLE))


PIPELINES: Mapping[str, tuple[_Defaults, Callable[[CallReader, Size, Texts, Texts], _Inputs]]] = {
    "FluxPipeline": (_Defaults(), _text_to_image),
    "FluxImg2ImgPipeline": (_Defaults(guidance=7.0, strength=0.6), _image_to_image),
    "FluxFillPipeline": (_Defaults(steps=50, guidance=30.0, strength=1.0), _fill),
    "FluxControlPipeline": (_Defaults(), _control),
    "FluxKontextPipeline": (_Defaults(), _kontext),
}


class FluxCallMapping(CallMapping):
    """One denoiser; guidance branches are separate calls, the conditional one first."""

    def request(self, case: Case, transformer: Mapping[str, object]) -> Request:
        """See CallMapping. The reference ignores guidance_scale without an embedding, and a negative prompt
        unless true_cfg_scale is above 1; kdit refuses or warns, so neither is passed on then.
        """
        call = CallReader(case)
        defaults, read_inputs = PIPELINES[case.pipeline]
        copies = call.whole("num_images_per_prompt", 1)
        prompt, prompt_2, negative, negative_2 = (
            repeated(call.texts(key), copies) for key in ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")
        )
        if prompt is None:
            raise InputError(f"{case.where}: the call has no prompt")
        if copies > 1 and isinstance(prompt, str):
            prompt = [prompt] * copies
        cfg_scale = call.number("true_cfg_scale", NO_CFG)
        guidance = call.number("guidance_scale", defaults.guidance)
        if negative is None or cfg_scale <= 1:
            negative, negative_2, cfg_scale = None, None, NO_CFG
        seed, feeds = _seed_and_draws(call, 1 if isinstance(prompt, str) else len(prompt))
        size = call.whole("width", SIDE), call.whole("height", SIDE)
        inputs = read_inputs(call, size, prompt_2, negative_2)
        request = Request(
            prompt=prompt,
            prompt_negative=negative,
            sample_config=SampleConfig(
                steps=call.whole("num_inference_steps", defaults.steps),
                max_sequence_length=call.whole("max_sequence_length", TEXT_LENGTH),
                guidance_scale=guidance if transformer.get("guidance_embeds") else None,
                cfg_scale=cfg_scale,
                strength=None if defaults.strength is None else call.number("strength", defaults.strength),
            ),
            runtime_config=RuntimeConfig(size=inputs.size, seed=seed),
            extra_inputs=inputs.extra if inputs.extra.given() else None,
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
        return _of_latents(case, "denoiser.transformer.call0.in.hidden_states")

    def first_outputs(self, case: Case, request: Request) -> list[Pair]:
        """Call 0 is the conditional pass, call 1 the unconditional one."""
        names = ["positive"] if request.prompt_negative is None else ["positive", "negative"]
        return [(name, _of_latents(case, f"denoiser.transformer.call{i}.out")) for i, name in enumerate(names)]

    def denoiser_calls(self, request: Request, num_steps: int) -> Mapping[str, int]:
        """One call per step and branch."""
        return {"transformer": num_steps * (1 if request.prompt_negative is None else 2)}


def _seed_and_draws(
    call: CallReader, num_samples: int
) -> tuple[int | tuple[int, ...] | None, dict[TensorKey, Tensor | list[Tensor]] | None]:
    """As ``seed_and_noise``; where noise is fed, so is the last posterior that was sampled."""
    seed, feeds = seed_and_noise(call, num_samples)
    posteriors = [draw for draw in call.case.draws if draw["by"] == "vae"]
    if feeds is not None and posteriors:
        feeds[TensorKey.POSTERIOR_NOISE] = call.case.tensor(str(posteriors[-1]["key"]))
    return seed, feeds


def _of_latents(case: Case, key: str) -> Tensor:
    """Of a recorded tensor [B, L, c] the tokens and channels of the latents; images' tokens and channels follow."""
    _, num_tokens, num_channels = case.tensor("latents").shape
    return case.tensor(key)[:, :num_tokens, :num_channels]


MAPPING = FluxCallMapping()
