"""WanParams: the sizes of a Wan 2.1 or 2.2 transformer, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kdit.models.config_reader import ConfigReader

NORM = "rms_norm_across_heads"
# Values of absent keys: the defaults of diffusers' WanTransformer3DModel.
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 13824,
        "num_layers": 40,
        "cross_attn_norm": True,
        "qk_norm": NORM,
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WanParams:
    """Sizes of the network. ``in_channels`` beyond ``out_channels`` carry encoded frames and their mask."""

    patch_size: tuple[int, ...]  # frames, rows, columns
    in_channels: int
    out_channels: int
    num_layers: int
    num_heads: int
    head_dim: int
    ffn_dim: int
    txt_dim: int
    time_channels: int
    image_dim: int | None  # width of the image encoder's tokens; None: the model reads none
    image_tokens: int | None  # number of positions learnt for them (first and last frame); None: no positions
    cross_attn_norm: bool
    eps: float
    max_grid: int  # patches along one axis that the reference has rotary tables for

    @property
    def dim(self) -> int:
        """D, the width of the stream."""
        return self.num_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> WanParams:
        """Read config.json. Raises CheckpointError naming the key, what it holds and what is expected."""
        read = ConfigReader(config, "WanTransformer3DModel", defaults=DEFAULTS)
        read.require("qk_norm", NORM)
        params = cls(
            patch_size=read.ints("patch_size", low=1, high=65),
            in_channels=read.size("in_channels"),
            out_channels=read.optional_size("out_channels") or read.size("in_channels"),
            num_layers=read.size("num_layers"),
            num_heads=read.size("num_attention_heads"),
            head_dim=read.size("attention_head_dim"),
            ffn_dim=read.size("ffn_dim"),
            txt_dim=read.size("text_dim"),
            time_channels=read.size("freq_dim"),
            image_dim=read.optional_size("image_dim"),
            image_tokens=read.optional_size("pos_embed_seq_len"),
            cross_attn_norm=read.flag("cross_attn_norm"),
            eps=read.number("eps"),
            max_grid=read.size("rope_max_seq_len"),
        )
        if len(params.patch_size) != 3:
            raise read.refuse("patch_size", "three whole numbers: frames, rows, columns")
        if params.head_dim % 2 or params.head_dim < 6:
            raise read.refuse("attention_head_dim", "an even number from 6 up, which rotary positions split in three")
        if params.out_channels > params.in_channels:
            raise read.refuse("out_channels", f"at most in_channels, {params.in_channels}")
        expected = None if params.image_dim is None else params.dim
        if read.optional_size("added_kv_proj_dim") != expected:
            raise read.refuse("added_kv_proj_dim", f"{expected} (the width of the stream if image_dim is set)")
        if params.image_tokens is not None and params.image_dim is None:
            raise read.refuse("pos_embed_seq_len", "null, since image_dim is null")
        return params
