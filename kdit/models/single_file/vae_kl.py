"""The KL autoencoder in single files: names of the latent-diffusion layout, and sizes from shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kdit.models.single_file.family import Config, Shapes, VaeForm, num_indices
from kdit.models.single_file.name_rule import NameRule, layer, rename
from kdit.models.weights.header import TensorInfo

CLASS_NAME = "AutoencoderKL"
_STORED_MARKS = ("encoder.down.0.block.0.conv1.weight", "decoder.up.0.block.0.conv1.weight")
_DIFFUSERS_MARKS = ("encoder.down_blocks.0.resnets.0.conv1.weight", "decoder.up_blocks.0.resnets.0.conv1.weight")
# The video autoencoders of diffusers have the same names, but convolutions in three dimensions.
_CONV_DIMS = 4
_RESNET = ("norm1", "conv1", "norm2", "conv2")


def kl_autoencoder(*, scaling_factor: float, shift_factor: float) -> VaeForm:
    """The autoencoder with the numbers that a family's latents are scaled by, which no shape tells."""
    of_family = {"scaling_factor": scaling_factor, "shift_factor": shift_factor}

    def config(shapes: Shapes, like: Mapping[str, object]) -> Config:
        return config_from_shapes(shapes, of_family | dict(like))

    return VaeForm(class_name=CLASS_NAME, recognise=recognise, config=config)


def recognise(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo] | None:
    """The autoencoder's tensors under diffusers' names; None if they are none of a KL autoencoder."""
    for marks, rules in ((_STORED_MARKS, _rules), (_DIFFUSERS_MARKS, _no_rules)):
        if all(mark in tensors and len(tensors[mark].shape) == _CONV_DIMS for mark in marks):
            return rename(tensors, rules(tensors))
    return None


def config_from_shapes(shapes: Shapes, like: Mapping[str, object]) -> Config:
    """The autoencoder's config; ``like``: what no shape tells."""
    levels = num_indices(shapes, "encoder.down_blocks")
    widths = [shapes[f"encoder.down_blocks.{i}.resnets.0.conv1.weight"][0] for i in range(levels)]
    untold = ("norm_num_groups", "act_fn", "force_upcast", "scaling_factor", "shift_factor")
    return {
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "block_out_channels": widths,
        "layers_per_block": num_indices(shapes, "encoder.down_blocks.0.resnets"),
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "mid_block_add_attention": "encoder.mid_block.attentions.0.to_q.weight" in shapes,
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
        **{name: like[name] for name in untold if name in like},
    }


def _no_rules(names: Collection[str]) -> tuple[NameRule, ...]:
    return ()


def _rules(names: Collection[str]) -> tuple[NameRule, ...]:
    """The levels of the decoder are counted from the other end."""
    levels = num_indices(names, "encoder.down")
    rules: list[NameRule] = [*layer("quant_conv", "quant_conv"), *layer("post_quant_conv", "post_quant_conv")]
    for side in ("encoder", "decoder"):
        for name in ("conv_in", "conv_out"):
            rules += layer(f"{side}.{name}", f"{side}.{name}")
        rules += layer(f"{side}.norm_out", f"{side}.conv_norm_out")
        for i in range(2):
            rules += _resnet(f"{side}.mid.block_{i + 1}", f"{side}.mid_block.resnets.{i}")
        attention, ours = f"{side}.mid.attn_1", f"{side}.mid_block.attentions.0"
        rules += layer(f"{attention}.norm", f"{ours}.group_norm")
        for stored, name in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")):
            rules += layer(f"{attention}.{stored}", f"{ours}.{name}", change="drop_ones")
    for i in range(levels):
        rules += _resnet(f"encoder.down.{i}.block.{{}}", f"encoder.down_blocks.{i}.resnets.{{}}")
        rules += layer(f"encoder.down.{i}.downsample.conv", f"encoder.down_blocks.{i}.downsamplers.0.conv")
        up = levels - 1 - i
        rules += _resnet(f"decoder.up.{i}.block.{{}}", f"decoder.up_blocks.{up}.resnets.{{}}")
        rules += layer(f"decoder.up.{i}.upsample.conv", f"decoder.up_blocks.{up}.upsamplers.0.conv")
    return tuple(rules)


def _resnet(stored: str, ours: str) -> list[NameRule]:
    rules = [rule for name in _RESNET for rule in layer(f"{stored}.{name}", f"{ours}.{name}")]
    return [*rules, *layer(f"{stored}.nin_shortcut", f"{ours}.conv_shortcut")]
