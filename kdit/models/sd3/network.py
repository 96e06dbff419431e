"""Stable Diffusion 3 and 3.5: MMDiT, two streams joined in attention (Esser et al. 2024, arXiv 2403.03206)."""

# R rows, Li image tokens, Lt text tokens, D model dim, H heads, K head dim (D = H K), P patch size
# mod [R, n, D]: n modulation vectors of a block for each row; scales are stored as 1 + scale

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdit.errors import InputError
from kdit.models.network import Network
from kdit.models.rows import Cond, LatentShape, ModTable, Rows, Static, Streams
from kdit.models.sd3.config import SD3Params
from kdit.models.weight_rule import WeightRule, fused, plain
from kdit.ops.attention import Role, SeqLayout, attention
from kdit.ops.linear import Linear, linear
from kdit.ops.mlp import Mlp, gelu_tanh
from kdit.ops.opset import OpSet
from kdit.ops.patch import PatchEmbed, patchify, unpatchify
from kdit.ops.timestep import timestep_embedding

NORM_EPS = 1e-6
MLP_RATIO = 4
TIME_CHANNELS = 256
# Modulation vectors of a stream in a block, in this order; the slices pick the scales among them.
PLAIN_MOD = 6  # shift, scale, gate of attention, the same of the MLP
DUAL_MOD = 9  # and the same of the second attention
LAST_TXT_MOD, HEAD_MOD = 2, 2  # scale, shift
SHIFT_FIRST, SCALE_FIRST = slice(1, None, 3), slice(0, None, 2)


def norm(x: Tensor) -> Tensor:
    """LayerNorm without weights."""
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)


def modulate(normed: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """normed * scale + shift; shift and scale [R, 1, D]."""
    return torch.addcmul(shift, normed, scale)


def vectors(mod: Tensor) -> tuple[Tensor, ...]:
    """[R, n, D] -> n times [R, 1, D]."""
    return mod[:, :, None].unbind(1)


class QKV(nn.Module):
    """Queries, keys and values of one stream; in 3.5 with an RMS norm of queries and keys over the head dim."""

    def __init__(self, params: SD3Params, ops: OpSet) -> None:
        super().__init__()
        self.head_dim, self.ops = params.head_dim, ops
        self.proj = Linear(params.dim, 3 * params.dim, ops=ops)
        self.norm_q = nn.RMSNorm(params.head_dim, NORM_EPS) if params.qk_norm else nn.Identity()
        self.norm_k = nn.RMSNorm(params.head_dim, NORM_EPS) if params.qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[R, L, D] -> q, k, v [R, L, H, K]."""
        q, k, v = torch.unflatten(self.proj(x), -1, (3, -1, self.head_dim)).unbind(2)
        return self.norm_q(q), self.norm_k(k), v

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same without the queries: k, v [R, L, H, K]."""
        weight, bias = (p[p.shape[0] // 3 :] for p in (self.proj.weight, self.proj.bias))
        k, v = torch.unflatten(linear(x, weight, bias, ops=self.ops), -1, (2, -1, self.head_dim)).unbind(2)
        return self.norm_k(k), v


class JointAttention(nn.Module):
    """Text and image tokens attend to each other, each stream with its own projections.

    ``last``: nobody reads the text tokens afterwards, so of them only keys and values are computed.
    """

    def __init__(self, params: SD3Params, ops: OpSet, *, last: bool) -> None:
        super().__init__()
        self.ops = ops
        self.img = QKV(params, ops)
        self.txt = QKV(params, ops)
        self.img_out = Linear(params.dim, params.dim, ops=ops)
        self.txt_out = None if last else Linear(params.dim, params.dim, ops=ops)

    def forward(self, img: Tensor, txt: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """img [R, Li, D], txt [R, Lt, D] -> the same shapes."""
        q, img_k, img_v = self.img(img)
        if self.txt_out is None:
            txt_k, txt_v = self.txt.keys_values(txt)
        else:
            txt_q, txt_k, txt_v = self.txt(txt)
            q = torch.cat((txt_q, q), dim=1)
        k, v = torch.cat((txt_k, img_k), dim=1), torch.cat((txt_v, img_v), dim=1)
        joint = attend(q, k, v, rows, Role.JOINT, self.ops)
        if self.txt_out is None:
            return self.img_out(joint), None
        txt_attn, img_attn = joint.tensor_split([txt.shape[1]], dim=1)
        return self.img_out(img_attn), self.txt_out(txt_attn)


class ImageAttention(nn.Module):
    """Image tokens attend among themselves: the second attention of 3.5's first blocks."""

    def __init__(self, params: SD3Params, ops: OpSet) -> None:
        super().__init__()
        self.ops = ops
        self.img = QKV(params, ops)
        self.img_out = Linear(params.dim, params.dim, ops=ops)

    def forward(self, img: Tensor, rows: Rows) -> Tensor:
        """[R, Li, D] -> [R, Li, D]."""
        q, k, v = self.img(img)
        out: Tensor = self.img_out(attend(q, k, v, rows, Role.SELF, self.ops))
        return out


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows, role: Role, ops: OpSet) -> Tensor:
    """q [R, Lq, H, K], k and v [R, Lk, H, K] -> [R, Lq, D]."""
    return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), layout=rows.layout, role=role, ops=ops)


class Block(nn.Module):
    """Joint attention, in ``dual`` blocks image attention beside it, then an MLP for each stream."""

    def __init__(self, params: SD3Params, ops: OpSet, *, dual: bool, last: bool) -> None:
        super().__init__()
        dim, hidden = params.dim, MLP_RATIO * params.dim
        self.attn = JointAttention(params, ops, last=last)
        self.dual_attn = ImageAttention(params, ops) if dual else None
        self.img_mlp = Mlp(dim, hidden, dim, act=gelu_tanh, ops=ops)
        self.txt_mlp = None if last else Mlp(dim, hidden, dim, act=gelu_tanh, ops=ops)

    def forward(self, x: Streams, mod: Tensor, rows: Rows) -> Streams:
        """mod [R, n, D]: the image's vectors, 9 in a dual block and 6 elsewhere, then the text's, 6 or 2."""
        img, txt = x
        assert txt is not None
        i_shift, i_scale, i_gate, i_shift2, i_scale2, i_gate2, *rest = vectors(mod)
        img_normed, txt_normed = norm(img), norm(txt)

        dual_out = None
        if self.dual_attn is not None:
            d_shift, d_scale, d_gate, *rest = rest
            dual_out = d_gate * self.dual_attn(modulate(img_normed, d_shift, d_scale), rows)
        t_shift, t_scale = rest[:2] if self.txt_mlp is not None else reversed(rest)

        img_attn, txt_attn = self.attn(
            modulate(img_normed, i_shift, i_scale), modulate(txt_normed, t_shift, t_scale), rows
        )
        img = torch.addcmul(img, i_gate, img_attn)
        if dual_out is not None:
            img = img + dual_out
        img = torch.addcmul(img, i_gate2, self.img_mlp(modulate(norm(img), i_shift2, i_scale2)))
        if self.txt_mlp is None or txt_attn is None:
            return Streams(img, None)

        t_gate, t_shift2, t_scale2, t_gate2 = rest[2:]
        txt = torch.addcmul(txt, t_gate, txt_attn)
        txt = torch.addcmul(txt, t_gate2, self.txt_mlp(modulate(norm(txt), t_shift2, t_scale2)))
        return Streams(img, txt)


class Modulation(nn.Module):
    """Time and pooled text to the modulation vectors of every block and of the head. Unused in the loop."""

    def __init__(self, params: SD3Params, ops: OpSet) -> None:
        super().__init__()
        dim, last = params.dim, params.num_layers - 1
        self.dim = dim
        self.time = Mlp(TIME_CHANNELS, dim, dim, act=F.silu, ops=ops)
        self.pooled = Mlp(params.pooled_dim, dim, dim, act=F.silu, ops=ops)
        img = (DUAL_MOD if i in params.dual_layers else PLAIN_MOD for i in range(params.num_layers))
        txt = (LAST_TXT_MOD if i == last else PLAIN_MOD for i in range(params.num_layers))
        self.img = nn.ModuleList(Linear(dim, n * dim, ops=ops) for n in img)
        self.txt = nn.ModuleList(Linear(dim, n * dim, ops=ops) for n in txt)
        self.head = Linear(dim, HEAD_MOD * dim, ops=ops)

    def forward(self, timesteps: Tensor, pooled: Tensor) -> tuple[Tensor, ...]:
        """timesteps [steps], pooled [R, pooled_dim] -> [steps, R, n, D] per block, then the head's."""
        time = self.time(timestep_embedding(timesteps, TIME_CHANNELS).to(pooled.dtype))
        vec = F.silu(time[:, None] + self.pooled(pooled))  # [steps, R, D]
        flat = vec.flatten(0, 1)

        def table(layer: nn.Module, scales: slice) -> Tensor:
            out: Tensor = layer(flat).view(*vec.shape[:2], -1, self.dim)
            out[:, :, scales] += 1
            return out

        img = [table(layer, SHIFT_FIRST) for layer in self.img]
        txt = [table(layer, SHIFT_FIRST) for layer in self.txt[:-1]] + [table(self.txt[-1], SCALE_FIRST)]
        blocks = (torch.cat(pair, dim=2) for pair in zip(img, txt, strict=True))
        return (*blocks, table(self.head, SCALE_FIRST))


class SD3Network(Network):
    """The transformer. Conditioning: ``txt`` [R, Lt, txt_dim] and ``pooled`` [R, pooled_dim]."""

    def __init__(self, params: SD3Params, ops: OpSet) -> None:
        super().__init__()
        dim, last = params.dim, params.num_layers - 1
        self.params, self.ops = params, ops
        self.patch = (params.patch_size, params.patch_size)
        self.img_in = PatchEmbed(params.channels, dim, self.patch, ops=ops)
        self.pos_table = nn.Parameter(torch.zeros(1, params.max_grid**2, dim))
        self.txt_in = Linear(params.txt_dim, dim, ops=ops)
        self.blocks = nn.ModuleList(
            Block(params, ops, dual=i in params.dual_layers, last=i == last) for i in range(params.num_layers)
        )
        self.modulation = Modulation(params, ops)
        self.img_out = Linear(dim, params.patch_size**2 * params.channels, ops=ops)

    @classmethod
    def from_config(cls, config: Mapping[str, object], *, ops: OpSet) -> Self:
        """Build from transformer/config.json."""
        return cls(SD3Params.from_config(config), ops)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of latents and conditioning."""
        return self.img_in.weight.dtype

    def prepare_static(self, cond: Cond, shape: LatentShape) -> Static:
        """Project the text and cut the position table for latents of ``shape`` (C, H, W).

        Raises InputError for a size that is no multiple of the patch or larger than the table.
        """
        txt = self.txt_in(cond["txt"])
        pos = self._positions(*shape[1:])
        num_rows, txt_len, img_len = txt.shape[0], txt.shape[1], pos.shape[0]
        layout = SeqLayout((img_len,) * num_rows, (txt_len,) * num_rows, txt_len + img_len)
        return Static(layout, {"txt": txt}, {"pos": pos})

    def _positions(self, height: int, width: int) -> Tensor:
        """The middle of the position table, [Li, D]: sizes differ in what they cut away, not in scale."""
        side, patch = self.params.max_grid, self.params.patch_size
        if height % patch or width % patch or max(height, width) > side * patch:
            raise InputError(
                f"latent size {width}x{height}: each side must be a multiple of {patch}, at most {side * patch} "
                f"(the model's position table has {side}x{side} patches)"
            )
        rows, columns = height // patch, width // patch
        top, left = (side - rows) // 2, (side - columns) // 2
        table = self.pos_table.view(side, side, -1)
        return table[top : top + rows, left : left + columns].flatten(0, 1)

    def prepare_mod(self, timesteps: Tensor, cond: Cond) -> ModTable:
        """Modulation vectors of ``timesteps`` [steps], 0 to 1000."""
        return ModTable(self.modulation(timesteps, cond["pooled"]))

    def embed(self, rows: Rows) -> Streams:
        """Latents [R, C, H, W] to hidden image tokens; the text comes projected."""
        img = self.img_in(patchify(rows.latents, self.patch)) + rows.static.shared["pos"]
        return Streams(img, rows.static.rows["txt"])

    def head(self, x: Streams, rows: Rows) -> Tensor:
        """Hidden image tokens to the velocity [R, C, H, W]."""
        scale, shift = vectors(rows.mod[-1])
        tokens = self.img_out(modulate(norm(x.img), shift, scale))
        return unpatchify(tokens, self.patch, tuple(rows.latents.shape[2:]))

    rules = (
        *plain("img_in", "pos_embed.proj"),
        WeightRule("pos_table", ("pos_embed.pos_embed",)),
        *plain("txt_in", "context_embedder"),
        *plain("modulation.time.fc_in", "time_text_embed.timestep_embedder.linear_1"),
        *plain("modulation.time.fc_out", "time_text_embed.timestep_embedder.linear_2"),
        *plain("modulation.pooled.fc_in", "time_text_embed.text_embedder.linear_1"),
        *plain("modulation.pooled.fc_out", "time_text_embed.text_embedder.linear_2"),
        *plain("modulation.img.{}", "transformer_blocks.{}.norm1.linear"),
        *plain("modulation.txt.{}", "transformer_blocks.{}.norm1_context.linear"),
        *plain("modulation.head", "norm_out.linear"),
        *fused(
            "blocks.{}.attn.img.proj", tuple(f"transformer_blocks.{{}}.attn.to_{n}" for n in "qkv"), parts=(1, 1, 1)
        ),
        *fused(
            "blocks.{}.attn.txt.proj",
            tuple(f"transformer_blocks.{{}}.attn.add_{n}_proj" for n in "qkv"),
            parts=(1, 1, 1),
        ),
        *fused(
            "blocks.{}.dual_attn.img.proj",
            tuple(f"transformer_blocks.{{}}.attn2.to_{n}" for n in "qkv"),
            parts=(1, 1, 1),
        ),
        *(
            WeightRule(f"blocks.{{}}.{target}_{n}.weight", (f"transformer_blocks.{{}}.{source}_{n}.weight",))
            for target, source in (
                ("attn.img.norm", "attn.norm"),
                ("attn.txt.norm", "attn.norm_added"),
                ("dual_attn.img.norm", "attn2.norm"),
            )
            for n in "qk"
        ),
        *plain("blocks.{}.attn.img_out", "transformer_blocks.{}.attn.to_out.0", shard="row"),
        *plain("blocks.{}.attn.txt_out", "transformer_blocks.{}.attn.to_add_out", shard="row"),
        *plain("blocks.{}.dual_attn.img_out", "transformer_blocks.{}.attn2.to_out.0", shard="row"),
        *plain("blocks.{}.img_mlp.fc_in", "transformer_blocks.{}.ff.net.0.proj", shard="col"),
        *plain("blocks.{}.img_mlp.fc_out", "transformer_blocks.{}.ff.net.2", shard="row"),
        *plain("blocks.{}.txt_mlp.fc_in", "transformer_blocks.{}.ff_context.net.0.proj", shard="col"),
        *plain("blocks.{}.txt_mlp.fc_out", "transformer_blocks.{}.ff_context.net.2", shard="row"),
        *plain("img_out", "proj_out"),
    )
    streamed = ("modulation",)


NETWORK = SD3Network
