"""Stable Diffusion 3's arguments in diffusers."""

from kdit.cli.bench.call import BenchCall


def text_to_image(call: BenchCall) -> dict[str, object]:
    """``guidance_scale`` is classifier-free guidance here."""
    return {"guidance_scale": call.cfg_scale, "negative_prompt": call.negative or ""}


CALLS = {"StableDiffusion3Pipeline": text_to_image}
