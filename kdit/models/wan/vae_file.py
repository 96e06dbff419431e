"""The autoencoder of Wan 2.1 and 2.2 A14B in single files. That of 2.2 5B, of another structure, comes in folders."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kdit.models.single_file.family import Config, Shapes, VaeForm, num_indices
from kdit.models.single_file.name_rule import NameRule, layer, named, rename
from kdit.models.weights.header import TensorInfo

_STORED_MARKS = ("encoder.downsamples.0.residual.2.weight", "decoder.upsamples.0.residual.2.weight", "conv1.weight")
_DIFFUSERS_MARKS = (
    "encoder.down_blocks.0.conv1.weight",
    "decoder.up_blocks.0.resnets.0.conv1.weight",
    "quant_conv.weight",
)
_LEVELS = 4
# Of the 16 latent channels, as published with 2.1.
LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip


def recognise(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo] | None:
    """The autoencoder's tensors under diffusers' names; None if they are of another model."""
    if all(mark in tensors for mark in _STORED_MARKS):
        return rename(tensors, _rules(tensors))
    if all(mark in tensors for mark in _DIFFUSERS_MARKS):
        return rename(tensors, ())
    return None


def config_from_shapes(shapes: Shapes, like: Mapping[str, object]) -> Config:
    """The autoencoder's config; ``like`` counts where it states how latents are scaled."""
    base, channels = shapes["encoder.conv_in.weight"][0], shapes["post_quant_conv.weight"][0]
    scales = like if like.get("z_dim") == channels else {}
    per_level = num_indices(shapes, "decoder.up_blocks.0.resnets") - 1
    # encoder: per level its residual blocks, then one that halves the size, with time where it has a time_conv
    ends = [level * (per_level + 1) + per_level for level in range(_LEVELS - 1)]
    widths = [shapes[f"encoder.down_blocks.{level * (per_level + 1)}.conv1.weight"][0] for level in range(_LEVELS)]
    return {
        "base_dim": base,
        "z_dim": channels,
        "dim_mult": [width // base for width in widths],
        "num_res_blocks": per_level,
        "attn_scales": [],
        "temperal_downsample": [f"encoder.down_blocks.{i}.time_conv.weight" in shapes for i in ends],
        "latents_mean": scales.get("latents_mean", list(LATENTS_MEAN)),
        "latents_std": scales.get("latents_std", list(LATENTS_STD)),
    }


def _rules(names: Collection[str]) -> tuple[NameRule, ...]:
    """The decoder's blocks are counted through; diffusers counts them by level."""
    per_level = (num_indices(names, "decoder.upsamples") - (_LEVELS - 1)) // _LEVELS
    rules = [*layer("conv1", "quant_conv"), *layer("conv2", "post_quant_conv")]
    for side in ("encoder", "decoder"):
        rules += [
            *layer(f"{side}.conv1", f"{side}.conv_in"),
            *named(f"{side}.head.0.gamma", f"{side}.norm_out.gamma"),
            *layer(f"{side}.head.2", f"{side}.conv_out"),
            *_resnet(f"{side}.middle.0", f"{side}.mid_block.resnets.0"),
            *named(f"{side}.middle.1.norm.gamma", f"{side}.mid_block.attentions.0.norm.gamma"),
            *layer(f"{side}.middle.1.to_qkv", f"{side}.mid_block.attentions.0.to_qkv"),
            *layer(f"{side}.middle.1.proj", f"{side}.mid_block.attentions.0.proj"),
            *_resnet(f"{side}.middle.2", f"{side}.mid_block.resnets.1"),
        ]
    rules += _resnet("encoder.downsamples.{}", "encoder.down_blocks.{}")
    rules += _resample("encoder.downsamples.{}", "encoder.down_blocks.{}")
    for level in range(_LEVELS):
        first, block = level * (per_level + 1), f"decoder.up_blocks.{level}"
        for i in range(per_level):
            rules += _resnet(f"decoder.upsamples.{first + i}", f"{block}.resnets.{i}")
        rules += _resample(f"decoder.upsamples.{first + per_level}", f"{block}.upsamplers.0")
    return tuple(rules)


def _resnet(stored: str, ours: str) -> list[NameRule]:
    return [
        *named(f"{stored}.residual.0.gamma", f"{ours}.norm1.gamma"),
        *layer(f"{stored}.residual.2", f"{ours}.conv1"),
        *named(f"{stored}.residual.3.gamma", f"{ours}.norm2.gamma"),
        *layer(f"{stored}.residual.6", f"{ours}.conv2"),
        *layer(f"{stored}.shortcut", f"{ours}.conv_shortcut"),
    ]


def _resample(stored: str, ours: str) -> list[NameRule]:
    return [*layer(f"{stored}.resample.1", f"{ours}.resample.1"), *layer(f"{stored}.time_conv", f"{ours}.time_conv")]


AUTOENCODER = VaeForm(class_name="AutoencoderKLWan", recognise=recognise, config=config_from_shapes)
