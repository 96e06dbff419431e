"""FluxParams: the sizes of a FLUX.1 transformer, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kdit.models.config_reader import ConfigReader

# Values of absent keys: the defaults of diffusers' FluxTransformer2DModel.
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "patch_size": 1,
        "in_channels": 64,
        "out_channels": None,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": False,
        "axes_dims_rope": (16, 56, 56),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxParams:
    """Sizes of the network. Fields as the checkpoint's config names them, less the diffusers prefix."""

    in_channels: int
    out_channels: int
    num_layers: int
    num_single_layers: int
    attention_head_dim: int
    num_attention_heads: int
    joint_attention_dim: int
    pooled_projection_dim: int
    guidance_embeds: bool
    axes_dims_rope: tuple[int, ...]

    @property
    def hidden_size(self) -> int:
        """D, the width of both streams."""
        return self.attention_head_dim * self.num_attention_heads

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> FluxParams:
        """Read config.json. Raises CheckpointError naming the key, what it holds and what is expected."""
        reader = ConfigReader(config, "FLUX.1", defaults=DEFAULTS)
        reader.require("patch_size", 1)
        head_dim = reader.size("attention_head_dim")
        axes = reader.ints("axes_dims_rope", low=2, high=head_dim + 1)
        if sum(axes) != head_dim or any(axis % 2 for axis in axes):
            raise reader.refuse("axes_dims_rope", f"even numbers that add up to attention_head_dim, {head_dim}")
        return cls(
            in_channels=reader.size("in_channels"),
            out_channels=reader.optional_size("out_channels") or reader.size("in_channels"),
            num_layers=reader.count("num_layers"),
            num_single_layers=reader.count("num_single_layers"),
            attention_head_dim=head_dim,
            num_attention_heads=reader.size("num_attention_heads"),
            joint_attention_dim=reader.size("joint_attention_dim"),
            pooled_projection_dim=reader.size("pooled_projection_dim"),
            guidance_embeds=reader.flag("guidance_embeds"),
            axes_dims_rope=axes,
        )
