"""FLUX.1's arguments in diffusers."""

from kdit.cli.bench.call import BenchCall


def text_to_image(call: BenchCall) -> dict[str, object]:
    """Both kinds of guidance have a name of their own; without real guidance no negative prompt is encoded."""
    arguments: dict[str, object] = {"true_cfg_scale": call.cfg_scale}
    if call.negative is not None:
        arguments["negative_prompt"] = call.negative
    if call.guidance_scale is not None:
        arguments["guidance_scale"] = call.guidance_scale
    return arguments


CALLS = {"FluxPipeline": text_to_image}
