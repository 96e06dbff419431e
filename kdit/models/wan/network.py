"""Wan 2.1 and 2.2: video tokens with self-attention, cross-attention to text, shared AdaLN (arXiv 2503.20314)."""

# R rows, L video tokens, Lt context tokens (text or image), D model dim, H heads, K head dim (D = H K)
# F frames, each of L / F tokens; k times: rows of tokens with a time of their own
# mod [R, k * n, D]: for each time n modulation vectors of a block, float32; scales are stored as 1 + scale

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdit.errors import InputError
from kdit.models.network import Network
from kdit.models.rows import Cond, LatentShape, ModTable, Rows, Static, Streams
from kdit.models.wan.config import WanParams
from kdit.models.weight_rule import WeightRule, fused, plain
from kdit.ops.attention import Role, SeqLayout, attention
from kdit.ops.linear import Linear
from kdit.ops.mlp import Mlp, gelu_tanh
from kdit.ops.opset import OpSet
from kdit.ops.patch import PatchEmbed, patchify, unpatchify
from kdit.ops.rope import apply_rope, rope_table
from kdit.ops.timestep import timestep_embedding

BLOCK_MOD = 6  # shift, scale, gate of self-attention, the same of the MLP
HEAD_MOD = 2  # shift, scale


class Norm32(nn.LayerNorm):
    """LayerNorm computed in float32, whatever the stream's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D] in x's dtype."""
        return F.layer_norm(x.float(), x.shape[-1:], self.weight.float(), self.bias.float(), self.eps).to(x.dtype)


def modulate(x: Tensor, shift: Tensor, scale: Tensor, *, eps: float) -> Tensor:
    """LayerNorm without weights, then x * scale + shift, in float32; shift and scale [R, 1, D]."""
    return torch.addcmul(shift, F.layer_norm(x.float(), x.shape[-1:], eps=eps), scale).to(x.dtype)


def gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + y * gate, in float32; gate [R, 1, D]."""
    return torch.addcmul(x.float(), y.float(), gate).to(x.dtype)


def vectors(mod: Tensor, n: int) -> tuple[Tensor, ...]:
    """[R, k * n, D] -> n times [R, k, D]."""
    return torch.unflatten(mod, 1, (-1, n)).unbind(2)


def by_time(
    apply: Callable[..., Tensor], tokens: tuple[Tensor, ...], vectors: tuple[Tensor, ...], num_frames: int
) -> Tensor:
    """``apply`` to the tokens [R, L, D] of each time, with that time's vectors out of [R, k, D].

    The first k - 1 frames have a time each, the last time is that of all other frames. Slices, so no
    vector is ever repeated for each token.
    """
    num_times, length = vectors[0].shape[1], tokens[0].shape[1]
    if num_times == 1:
        return apply(*tokens, *vectors)
    assert num_times <= num_frames, f"{num_times} times for {num_frames} frames"
    frame = length // num_frames
    spans = [frame] * (num_times - 1) + [length - frame * (num_times - 1)]
    parts = zip(
        *(torch.split(t, spans, dim=1) for t in tokens), *(torch.split(v, 1, dim=1) for v in vectors), strict=True
    )
    return torch.cat([apply(*part) for part in parts], dim=1)


class SelfAttention(nn.Module):
    """Video tokens to video tokens; RMS norm of queries and keys over all heads, rotary positions on three axes."""

    def __init__(self, params: WanParams, ops: OpSet) -> None:
        super().__init__()
        self.head_dim, self.ops = params.head_dim, ops
        self.qkv = Linear(params.dim, 3 * params.dim, ops=ops)
        self.norm_q = nn.RMSNorm(params.dim, params.eps)
        self.norm_k = nn.RMSNorm(params.dim, params.eps)
        self.out = Linear(params.dim, params.dim, ops=ops)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """[R, L, D] -> [R, L, D]."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        table = rows.static.shared["rope"]
        q = apply_rope(heads(self.norm_q(q), self.head_dim), table)
        k = apply_rope(heads(self.norm_k(k), self.head_dim), table)
        attended = attention(q, k, heads(v, self.head_dim), layout=rows.layout, role=Role.SELF, ops=self.ops)
        out: Tensor = self.out(attended)
        return out


class CrossAttention(nn.Module):
    """Video tokens to text tokens, and to image tokens where the model reads them.

    No step changes the keys and values: ``Context`` has computed them.
    """

    def __init__(self, params: WanParams, index: int, ops: OpSet) -> None:
        super().__init__()
        self.head_dim, self.index, self.ops = params.head_dim, index, ops
        self.q = Linear(params.dim, params.dim, ops=ops)
        self.norm_q = nn.RMSNorm(params.dim, params.eps)
        self.out = Linear(params.dim, params.dim, ops=ops)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """[R, L, D] -> [R, L, D]."""
        q = heads(self.norm_q(self.q(x)), self.head_dim)
        prepared, index = rows.static.rows, self.index
        attended = self._attend(q, prepared[f"txt_kv.{index}"], rows)
        if f"image_kv.{index}" in prepared:
            attended = attended + self._attend(q, prepared[f"image_kv.{index}"], rows)
        out: Tensor = self.out(attended)
        return out

    def _attend(self, q: Tensor, kv: Tensor, rows: Rows) -> Tensor:
        k, v = kv.unbind(1)
        num_rows, length = k.shape[0], k.shape[2]
        layout = SeqLayout(rows.layout.img, (length,) * num_rows, max(rows.layout.img) + length)
        return attention(q, k, v, layout=layout, role=Role.CROSS, ops=self.ops)


def heads(x: Tensor, head_dim: int) -> Tensor:
    """[R, L, D] -> [R, H, L, K]."""
    return torch.unflatten(x, -1, (-1, head_dim)).transpose(1, 2)


class Block(nn.Module):
    """Self-attention, cross-attention, MLP; the first and the last modulated by time."""

    def __init__(self, params: WanParams, index: int, ops: OpSet) -> None:
        super().__init__()
        self.patch_frames = params.patch_size[0]
        self.modulate = partial(modulate, eps=params.eps)
        self.attn = SelfAttention(params, ops)
        self.cross = CrossAttention(params, index, ops)
        self.cross_norm = Norm32(params.dim, params.eps) if params.cross_attn_norm else nn.Identity()
        self.mlp = Mlp(params.dim, params.ffn_dim, params.dim, act=gelu_tanh, ops=ops)

    def forward(self, x: Streams, mod: Tensor, rows: Rows) -> Streams:
        """mod [R, k * 6, D]: for each time shift, scale, gate of self-attention, the same of the MLP."""
        img, num_frames = x.img, rows.latents.shape[2] // self.patch_frames
        shift, scale, gate, shift2, scale2, gate2 = vectors(mod, BLOCK_MOD)
        attn = self.attn(by_time(self.modulate, (img,), (shift, scale), num_frames), rows)
        img = by_time(gated, (img, attn), (gate,), num_frames)
        img = img + self.cross(self.cross_norm(img), rows)
        mlp = self.mlp(by_time(self.modulate, (img,), (shift2, scale2), num_frames))
        return Streams(by_time(gated, (img, mlp), (gate2,), num_frames), None)


class ContextKV(nn.Module):
    """Keys and values of context tokens for one block's cross-attention."""

    def __init__(self, params: WanParams, ops: OpSet) -> None:
        super().__init__()
        self.head_dim = params.head_dim
        self.kv = Linear(params.dim, 2 * params.dim, ops=ops)
        self.norm_k = nn.RMSNorm(params.dim, params.eps)

    def forward(self, context: Tensor) -> Tensor:
        """[R, Lt, D] -> [R, 2, H, Lt, K]."""
        k, v = self.kv(context).chunk(2, dim=-1)
        return torch.stack((heads(self.norm_k(k), self.head_dim), heads(v, self.head_dim)), dim=1)


class ImageEmbed(nn.Module):
    """Tokens of the image encoder to the stream's width. ``positions`` tell first from last frame."""

    def __init__(self, in_dim: int, num_tokens: int | None, dim: int, ops: OpSet) -> None:
        super().__init__()
        self.positions = None if num_tokens is None else nn.Parameter(torch.zeros(1, num_tokens, in_dim))
        self.norm_in = Norm32(in_dim)
        self.mlp = Mlp(in_dim, in_dim, dim, act=F.gelu, ops=ops)
        self.norm_out = Norm32(dim)

    def forward(self, image: Tensor) -> Tensor:
        """[R, Lt, in_dim] -> [R, Lt, D]."""
        if self.positions is not None:
            if image.shape[1] != self.positions.shape[1]:
                raise InputError(
                    f"got {image.shape[1]} image-encoder tokens, expected {self.positions.shape[1]}: "
                    "this model takes a first and a last frame"
                )
            image = image + self.positions
        tokens: Tensor = self.norm_out(self.mlp(self.norm_in(image)))
        return tokens


class Context(nn.Module):
    """Text and image tokens to the keys and values of every block. Unused in the loop."""

    def __init__(self, params: WanParams, ops: OpSet) -> None:
        super().__init__()
        self.txt = Mlp(params.txt_dim, params.dim, params.dim, act=gelu_tanh, ops=ops)
        self.txt_kv = nn.ModuleList(ContextKV(params, ops) for _ in range(params.num_layers))
        self.image, self.image_kv = None, nn.ModuleList()
        if params.image_dim is not None:
            self.image = ImageEmbed(params.image_dim, params.image_tokens, params.dim, ops)
            self.image_kv.extend(ContextKV(params, ops) for _ in range(params.num_layers))

    def forward(self, cond: Cond) -> dict[str, Tensor]:
        """``txt`` [R, Lt, txt_dim] and ``image`` [R, Lt, image_dim] to ``<name>_kv.<block>`` [R, 2, H, Lt, K]."""
        txt = self.txt(cond["txt"])
        prepared = {f"txt_kv.{i}": layer(txt) for i, layer in enumerate(self.txt_kv)}
        if self.image is not None:
            image = self.image(cond["image"])
            prepared |= {f"image_kv.{i}": layer(image) for i, layer in enumerate(self.image_kv)}
        return prepared


class Modulation(nn.Module):
    """Time to modulation vectors: one projection for all blocks, to which each adds a table. Unused in the loop."""

    def __init__(self, params: WanParams, ops: OpSet) -> None:
        super().__init__()
        dim = params.dim
        self.time_channels = params.time_channels
        self.time = Mlp(params.time_channels, dim, dim, act=F.silu, ops=ops)
        self.project = Linear(dim, BLOCK_MOD * dim, ops=ops)
        self.tables = nn.ParameterList(torch.zeros(1, BLOCK_MOD, dim) for _ in range(params.num_layers))
        self.head = nn.Parameter(torch.zeros(1, HEAD_MOD, dim))

    def forward(self, timesteps: Tensor) -> tuple[Tensor, ...]:
        """timesteps [steps, k] -> float32 [steps, k * n, D] per block, then the head's."""
        embedded = timestep_embedding(timesteps.flatten(), self.time_channels).to(self.time.fc_in.weight.dtype)
        time = self.time(embedded).to(self.project.weight.dtype)  # [steps * k, D]
        shared = self.project(F.silu(time)).view(-1, BLOCK_MOD, time.shape[-1]).float()

        def summed(table: Tensor, base: Tensor, scales: slice) -> Tensor:
            out = table.float() + base
            out[:, scales] += 1
            return out.view(timesteps.shape[0], -1, out.shape[-1])

        blocks = (summed(table, shared, slice(1, None, 3)) for table in self.tables)
        return (*blocks, summed(self.head, time[:, None].float(), slice(1, None)))


class WanNetwork(Network):
    """The transformer. Conditioning: ``txt`` [R, Lt, txt_dim]; where the model has them, ``image``
    [R, tokens, image_dim] from its image encoder and ``frames`` [R, in - out channels, F, H, W]: mask, encoded frames.
    """

    def __init__(self, params: WanParams, ops: OpSet) -> None:
        super().__init__()
        dim = params.dim
        self.params, self.ops = params, ops
        self.img_in = PatchEmbed(params.in_channels, dim, params.patch_size, ops=ops)
        self.blocks = nn.ModuleList(Block(params, i, ops) for i in range(params.num_layers))
        self.context = Context(params, ops)
        self.modulation = Modulation(params, ops)
        self.img_out = Linear(dim, params.out_channels * math.prod(params.patch_size), ops=ops)

    @classmethod
    def from_config(cls, config: Mapping[str, object], *, ops: OpSet) -> Self:
        """Build from transformer/config.json."""
        return cls(WanParams.from_config(config), ops)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of latents and conditioning."""
        return self.img_in.weight.dtype

    def prepare_static(self, cond: Cond, shape: LatentShape) -> Static:
        """Cross-attention keys and values, what given frames add to the tokens, and rotary table for latents of
        ``shape`` (C, F, H, W).

        Raises InputError for a size that is no multiple of the patch or beyond the model's range.
        """
        grid = self._grid(shape)
        cond = {key: value.to(self.dtype) for key, value in cond.items()}
        prepared = self.context(cond)
        if self.params.in_channels > self.params.out_channels:
            frames = patchify(cond["frames"], self.params.patch_size)
            prepared["frames"] = self.img_in.share(frames, slice(self.params.out_channels, None), bias=False)
        ids = torch.cartesian_prod(*(torch.arange(n, device=self.device) for n in grid))
        across = 2 * (self.params.head_dim // 6)  # channels for rows, and as many for columns
        rope = rope_table(ids, (self.params.head_dim - 2 * across, across, across))
        num_rows, txt_len, img_len = *cond["txt"].shape[:2], ids.shape[0]
        layout = SeqLayout((img_len,) * num_rows, (txt_len,) * num_rows, img_len + txt_len)
        return Static(layout, prepared, {"rope": rope})

    def _grid(self, shape: LatentShape) -> tuple[int, ...]:
        patch, limit = self.params.patch_size, self.params.max_grid
        grid = tuple(size // p for size, p in zip(shape[1:], patch, strict=True))
        if any(size % p for size, p in zip(shape[1:], patch, strict=True)) or max(grid) > limit:
            raise InputError(
                f"latent size (frames, height, width) {tuple(shape[1:])}: expected multiples of {patch} "
                f"with at most {limit} patches along each axis"
            )
        return grid

    def prepare_mod(self, timesteps: Tensor, cond: Cond) -> ModTable:
        """Modulation vectors of ``timesteps``, 0 to 1000: [steps], or [steps, k] if the first k - 1 latent
        frames have a time each and all later ones the last.
        """
        times = timesteps if timesteps.dim() == 2 else timesteps[:, None]
        num_rows = cond["txt"].shape[0]
        return ModTable(tuple(t[:, None].expand(-1, num_rows, -1, -1) for t in self.modulation(times)))

    def embed(self, rows: Rows) -> Streams:
        """Latents [R, C, F, H, W] to hidden video tokens; text is only met in cross-attention."""
        patches, frames = patchify(rows.latents, self.params.patch_size), rows.static.rows.get("frames")
        if frames is None:
            return Streams(self.img_in(patches), None)
        img = self.img_in.share(patches, slice(self.params.out_channels), bias=True)
        return Streams(img.add_(frames), None)

    def head(self, x: Streams, rows: Rows) -> Tensor:
        """Hidden video tokens to the velocity [R, C, F, H, W]."""
        patch, size = self.params.patch_size, tuple(rows.latents.shape[2:])
        shift, scale = vectors(rows.mod[-1], HEAD_MOD)
        img = by_time(partial(modulate, eps=self.params.eps), (x.img,), (shift, scale), size[0] // patch[0])
        return unpatchify(self.img_out(img), patch, size)

    rules = (
        *plain("img_in", "patch_embedding"),
        *plain("modulation.time.fc_in", "condition_embedder.time_embedder.linear_1"),
        *plain("modulation.time.fc_out", "condition_embedder.time_embedder.linear_2"),
        *plain("modulation.project", "condition_embedder.time_proj"),
        WeightRule("modulation.tables.{}", ("blocks.{}.scale_shift_table",)),
        WeightRule("modulation.head", ("scale_shift_table",)),
        *plain("context.txt.fc_in", "condition_embedder.text_embedder.linear_1"),
        *plain("context.txt.fc_out", "condition_embedder.text_embedder.linear_2"),
        WeightRule("context.image.positions", ("condition_embedder.image_embedder.pos_embed",)),
        *plain("context.image.norm_in", "condition_embedder.image_embedder.norm1"),
        *plain("context.image.mlp.fc_in", "condition_embedder.image_embedder.ff.net.0.proj"),
        *plain("context.image.mlp.fc_out", "condition_embedder.image_embedder.ff.net.2"),
        *plain("context.image.norm_out", "condition_embedder.image_embedder.norm2"),
        *fused("context.txt_kv.{}.kv", ("blocks.{}.attn2.to_k", "blocks.{}.attn2.to_v"), parts=(1, 1)),
        WeightRule("context.txt_kv.{}.norm_k.weight", ("blocks.{}.attn2.norm_k.weight",), "col"),
        *fused("context.image_kv.{}.kv", ("blocks.{}.attn2.add_k_proj", "blocks.{}.attn2.add_v_proj"), parts=(1, 1)),
        WeightRule("context.image_kv.{}.norm_k.weight", ("blocks.{}.attn2.norm_added_k.weight",), "col"),
        *fused("blocks.{}.attn.qkv", tuple(f"blocks.{{}}.attn1.to_{n}" for n in "qkv"), parts=(1, 1, 1)),
        WeightRule("blocks.{}.attn.norm_q.weight", ("blocks.{}.attn1.norm_q.weight",), "col"),
        WeightRule("blocks.{}.attn.norm_k.weight", ("blocks.{}.attn1.norm_k.weight",), "col"),
        *plain("blocks.{}.attn.out", "blocks.{}.attn1.to_out.0", shard="row"),
        *plain("blocks.{}.cross.q", "blocks.{}.attn2.to_q", shard="col"),
        WeightRule("blocks.{}.cross.norm_q.weight", ("blocks.{}.attn2.norm_q.weight",), "col"),
        *plain("blocks.{}.cross.out", "blocks.{}.attn2.to_out.0", shard="row"),
        *plain("blocks.{}.cross_norm", "blocks.{}.norm2"),
        *plain("blocks.{}.mlp.fc_in", "blocks.{}.ffn.net.0.proj", shard="col"),
        *plain("blocks.{}.mlp.fc_out", "blocks.{}.ffn.net.2", shard="row"),
        *plain("img_out", "proj_out"),
    )
    ignored = ("blocks.{}.attn2.norm_added_q.weight",)
    float32 = (
        "modulation.time",
        "modulation.tables",
        "modulation.head",
        "blocks.{}.cross_norm",
        "context.image.norm_in",
        "context.image.norm_out",
    )


NETWORK = WanNetwork
