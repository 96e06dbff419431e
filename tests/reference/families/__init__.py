"""Importing this package registers every family, in the order of the README."""

from importlib import import_module

for _name in (
    "flux",
    "flux2",
    "sd3",
    "qwen",
    "joyimage",
    "wan",
    "minimax_h3",
    "longcat",
    "z_image",
    "chroma",
    "sana",
    "hunyuan_video15",
    "ltx2",
):
    import_module(f"{__name__}.{_name}")
