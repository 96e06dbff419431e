"""Wan's arguments in diffusers."""

from kdit.cli.bench.call import BenchCall


def text_to_video(call: BenchCall) -> dict[str, object]:
    """``guidance_scale`` is classifier-free guidance here, ``guidance_scale_2`` that of the second expert."""
    arguments: dict[str, object] = {
        "guidance_scale": call.cfg_scale,
        "negative_prompt": call.negative or "",
        "num_frames": call.frames,
    }
    if call.cfg_scale_2 is not None:
        arguments["guidance_scale_2"] = call.cfg_scale_2
    return arguments


CALLS = {"WanPipeline": text_to_video}
