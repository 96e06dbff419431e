"""SD3Params: the sizes of a Stable Diffusion 3 transformer, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kdit.models.config_reader import ConfigReader

PATCH = 2  # latents per token along each side, in every published model; the schedule's shift counts such tokens
# Values of absent keys: the defaults of diffusers' SD3Transformer2DModel.
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "patch_size": PATCH,
        "in_channels": 16,
        "num_layers": 18,
        "attention_head_dim": 64,
        "num_attention_heads": 18,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1152,
        "pooled_projection_dim": 2048,
        "out_channels": 16,
        "pos_embed_max_size": 96,
        "dual_attention_layers": (),
        "qk_norm": None,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SD3Params:
    """Sizes of the network; its channels are the same in and out."""

    patch_size: int
    channels: int
    num_layers: int
    num_heads: int
    head_dim: int
    txt_dim: int
    pooled_dim: int
    max_grid: int  # patches along one side of the stored position table
    dual_layers: tuple[int, ...]  # blocks whose image tokens attend among themselves a second time
    qk_norm: bool

    @property
    def dim(self) -> int:
        """D, the width of both streams."""
        return self.num_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> SD3Params:
        """Read config.json. Raises CheckpointError naming the key, what it holds and what is expected."""
        read = ConfigReader(config, "SD3Transformer2DModel", defaults=DEFAULTS)
        num_layers = read.size("num_layers")
        params = cls(
            patch_size=read.size("patch_size"),
            channels=read.size("in_channels"),
            num_layers=num_layers,
            num_heads=read.size("num_attention_heads"),
            head_dim=read.size("attention_head_dim"),
            txt_dim=read.size("joint_attention_dim"),
            pooled_dim=read.size("pooled_projection_dim"),
            max_grid=read.size("pos_embed_max_size"),
            dual_layers=read.ints("dual_attention_layers", low=0, high=num_layers),
            qk_norm=read.require("qk_norm", None, "rms_norm") is not None,
        )
        if params.patch_size != PATCH:
            raise read.refuse("patch_size", str(PATCH))
        if read.size("caption_projection_dim") != params.dim:
            raise read.refuse("caption_projection_dim", f"{params.dim} (num_attention_heads * attention_head_dim)")
        if read.optional_size("out_channels") not in (None, params.channels):
            raise read.refuse("out_channels", f"{params.channels} as in_channels")
        return params
