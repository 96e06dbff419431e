"""FLUX.1: a rectified-flow transformer with joint text-image attention (Black Forest Labs 2024)."""

# R rows, Li image tokens, Lt text tokens, Lr tokens of reference pictures, L = Lt + Li + Lr, D hidden size, H heads,
# K head dim (D = H K). The image stream holds the image tokens, then the references.
# mod [R, n, D]: n modulation vectors of a block for each row; scales are stored as 1 + scale

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdit.models.flux.config import FluxParams
from kdit.models.network import Network
from kdit.models.rows import Cond, LatentShape, ModTable, Rows, Static, Streams
from kdit.models.weight_rule import WeightRule, fused, plain
from kdit.ops.attention import Role, SeqLayout, attention
from kdit.ops.linear import Linear, linear
from kdit.ops.mlp import Mlp, gelu_tanh
from kdit.ops.opset import OpSet
from kdit.ops.rope import apply_rope, rope_table
from kdit.ops.timestep import timestep_embedding

NORM_EPS = 1e-6
MLP_RATIO = 4
TIME_CHANNELS = 256
DOUBLE_MOD, SINGLE_MOD, HEAD_MOD = 12, 3, 2


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without weights, then x * scale + shift; shift and scale [R, 1, D]."""
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=NORM_EPS), scale)


class QKNorm(nn.Module):
    """RMS norm of queries and keys over the head dim, each with its own scale; both in one go."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2 * head_dim))  # of the queries, then of the keys

    def forward(self, qk: Tensor) -> Tensor:
        """qk [R, L, 2, H, K] -> the same."""
        return F.rms_norm(qk, qk.shape[-1:], eps=NORM_EPS) * self.scale.view(2, 1, -1)

    def keys(self, k: Tensor) -> Tensor:
        """Keys alone, [R, L, H, K] -> the same."""
        return F.rms_norm(k, k.shape[-1:], eps=NORM_EPS) * self.scale.chunk(2)[1]


class StreamLayers(nn.Module):
    """The layers that one stream (image or text) has for itself in a double block."""

    def __init__(self, params: FluxParams, ops: OpSet) -> None:
        super().__init__()
        dim = params.hidden_size
        self.qkv = Linear(dim, 3 * dim, ops=ops)
        self.norm = QKNorm(params.attention_head_dim)
        self.proj = Linear(dim, dim, ops=ops)
        self.mlp = Mlp(dim, MLP_RATIO * dim, dim, act=gelu_tanh, ops=ops)


class DoubleBlock(nn.Module):
    """Image and text with their own weights, joined in attention."""

    def __init__(self, params: FluxParams, ops: OpSet) -> None:
        super().__init__()
        self.num_heads, self.ops = params.num_attention_heads, ops
        self.img = StreamLayers(params, ops)
        self.txt = StreamLayers(params, ops)

    def forward(self, x: Streams, mod: Tensor, rows: Rows) -> Streams:
        """mod [R, 12, D]: shift, scale, gate of attention, the same of the MLP; image first, then text."""
        img, txt = x
        assert txt is not None
        i_shift, i_scale, i_gate, i_shift2, i_scale2, i_gate2, *text = mod.split(1, dim=1)
        t_shift, t_scale, t_gate, t_shift2, t_scale2, t_gate2 = text

        img_qkv = self.img.qkv(modulate(img, i_shift, i_scale)).unflatten(-1, (3, self.num_heads, -1))
        txt_qkv = self.txt.qkv(modulate(txt, t_shift, t_scale)).unflatten(-1, (3, self.num_heads, -1))
        qk = torch.cat((self.txt.norm(txt_qkv[:, :, :2]), self.img.norm(img_qkv[:, :, :2])), dim=1)
        v = torch.cat((txt_qkv[:, :, 2], img_qkv[:, :, 2]), dim=1)
        q, k = apply_rope(qk, rotations(rows, qk.shape[1])).unbind(2)
        attn = joint_attention(q, k, v, rows, self.ops)
        txt_attn, img_attn = attn.split((txt.shape[1], img.shape[1]), dim=1)

        img = torch.addcmul(img, i_gate, self.img.proj(img_attn))
        txt = torch.addcmul(txt, t_gate, self.txt.proj(txt_attn))
        img = torch.addcmul(img, i_gate2, self.img.mlp(modulate(img, i_shift2, i_scale2)))
        txt = torch.addcmul(txt, t_gate2, self.txt.mlp(modulate(txt, t_shift2, t_scale2)))
        return Streams(img, txt)


class SingleBlock(nn.Module):
    """Image and text as one sequence; attention and MLP side by side (Dehghani et al. 2023).

    ``last``: nobody reads text and references after this block, so of them only keys and values are computed.
    """

    def __init__(self, params: FluxParams, ops: OpSet, *, last: bool) -> None:
        super().__init__()
        dim = params.hidden_size
        self.dim, self.num_heads, self.last, self.ops = dim, params.num_attention_heads, last, ops
        self.linear1 = Linear(dim, (3 + MLP_RATIO) * dim, ops=ops)
        self.linear2 = Linear((1 + MLP_RATIO) * dim, dim, ops=ops)
        self.norm = QKNorm(params.attention_head_dim)

    def forward(self, x: Streams, mod: Tensor, rows: Rows) -> Streams:
        """mod [R, 3, D]: shift, scale, gate."""
        img, txt = x
        assert txt is not None
        shift, scale, gate = mod.split(1, dim=1)
        if self.last:
            return Streams(self._image_only(x, shift, scale, gate, rows), None)
        joint = torch.cat((txt, img), dim=1)
        qkv, mlp = self.linear1(modulate(joint, shift, scale)).split((3 * self.dim, MLP_RATIO * self.dim), dim=-1)
        qkv = qkv.unflatten(-1, (3, self.num_heads, -1))
        q, k = apply_rope(self.norm(qkv[:, :, :2]), rotations(rows, joint.shape[1])).unbind(2)
        joint = torch.addcmul(joint, gate, self._merge(joint_attention(q, k, qkv[:, :, 2], rows, self.ops), mlp))
        txt, img = joint.split((txt.shape[1], img.shape[1]), dim=1)
        return Streams(img, txt)

    def _merge(self, attn: Tensor, mlp: Tensor) -> Tensor:
        return self.linear2(torch.cat((attn, gelu_tanh(mlp)), dim=-1))

    def _image_only(self, x: Streams, shift: Tensor, scale: Tensor, gate: Tensor, rows: Rows) -> Tensor:
        assert x.txt is not None
        num_txt, num_img = x.txt.shape[1], rows.latents.shape[1]
        img, ref = x.img[:, :num_img], x.img[:, num_img:]
        qkv, mlp = self.linear1(modulate(img, shift, scale)).split((3 * self.dim, MLP_RATIO * self.dim), dim=-1)
        qkv = qkv.unflatten(-1, (3, self.num_heads, -1))
        keys_values = slice(self.dim, 3 * self.dim)
        others = modulate(torch.cat((x.txt, ref), dim=1), shift, scale)
        others = linear(others, self.linear1.weight[keys_values], self.linear1.bias[keys_values], ops=self.ops)
        other_k, other_v = others.unflatten(-1, (2, self.num_heads, -1)).unbind(2)
        table = rotations(rows, num_txt + x.img.shape[1])
        txt_at, img_at, ref_at = table.split((num_txt, num_img, ref.shape[1]), dim=1)
        q, img_k = apply_rope(self.norm(qkv[:, :, :2]), img_at).unbind(2)
        other_k = apply_rope(self.norm.keys(other_k), torch.cat((txt_at, ref_at), dim=1)[:, :, 0])
        k = torch.cat((other_k[:, :num_txt], img_k, other_k[:, num_txt:]), dim=1)
        v = torch.cat((other_v[:, :num_txt], qkv[:, :, 2], other_v[:, num_txt:]), dim=1)
        return torch.addcmul(img, gate, self._merge(joint_attention(q, k, v, rows, self.ops), mlp))


def joint_attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows, ops: OpSet) -> Tensor:
    """q [R, Lq, H, K]; k and v [R, L, H, K] -> [R, Lq, D]."""
    layout = rows.layout._replace(padded=k.shape[1])
    return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), layout=layout, role=Role.JOINT, ops=ops)


def rotations(rows: Rows, length: int) -> Tensor:
    """The rotary table of the first ``length`` joint tokens, [1 or R, length, 1, 1, K/2]: references differ by row."""
    static = rows.static
    return (static.rows if "rope" in static.rows else static.shared)["rope"][:, :length]


def qk_scale(target: str, query: str, key: str) -> WeightRule:
    """The rule for the scales of one QKNorm."""
    return WeightRule(f"{target}.norm.scale", (f"{query}.weight", f"{key}.weight"), None, (1, 1))


class FluxNetwork(Network):
    """The transformer. Conditioning: ``txt`` [R, Lt, joint_attention_dim], ``pooled`` [R, pooled_projection_dim]
    and, if the model is guidance-distilled, ``guidance`` [R].

    ``channels`` [R, Li, c]: what no step changes of the image tokens' input, after the c0 channels of the latents.
    ``ref`` [R, Lr, in_channels] and ``ref_ids`` [R, Lr, 3]: tokens of reference pictures and their coordinates,
    padded where the first coordinate is 0.
    """

    def __init__(self, params: FluxParams, ops: OpSet) -> None:
        super().__init__()
        dim = params.hidden_size
        self.params, self.ops = params, ops
        self.img_in = Linear(params.in_channels, dim, ops=ops)
        self.txt_in = Linear(params.joint_attention_dim, dim, ops=ops)
        self.time_in = Mlp(TIME_CHANNELS, dim, dim, act=F.silu, ops=ops)
        self.guidance_in = Mlp(TIME_CHANNELS, dim, dim, act=F.silu, ops=ops) if params.guidance_embeds else None
        self.vector_in = Mlp(params.pooled_projection_dim, dim, dim, act=F.silu, ops=ops)
        last = params.num_single_layers - 1
        self.double_blocks = nn.ModuleList(DoubleBlock(params, ops) for _ in range(params.num_layers))
        self.single_blocks = nn.ModuleList(
            SingleBlock(params, ops, last=i == last) for i in range(params.num_single_layers)
        )
        self.blocks = (*self.double_blocks, *self.single_blocks)
        self.double_mods = nn.ModuleList(Linear(dim, DOUBLE_MOD * dim, ops=ops) for _ in self.double_blocks)
        self.single_mods = nn.ModuleList(Linear(dim, SINGLE_MOD * dim, ops=ops) for _ in self.single_blocks)
        self.head_mod = Linear(dim, HEAD_MOD * dim, ops=ops)
        self.img_out = Linear(dim, params.out_channels, ops=ops)

    @classmethod
    def from_config(cls, config: Mapping[str, object], *, ops: OpSet) -> Self:
        """Build from transformer/config.json."""
        return cls(FluxParams.from_config(config), ops)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of latents and conditioning."""
        return self.img_in.weight.dtype

    def prepare_static(self, cond: Cond, shape: LatentShape) -> Static:
        """Project what is given beside the latents; make the rotary table for latents of ``shape`` (C, H, W)."""
        static = {"txt": self.txt_in(cond["txt"])}
        num_rows, num_txt, _ = static["txt"].shape
        _, height, width = shape
        ids = position_ids(num_txt, height // 2, width // 2, static["txt"].device)
        if "channels" in cond:
            static["channels"] = self._embed_channels(cond["channels"])
        num_img, layout_txt = ids.shape[0] - num_txt, (num_txt,) * num_rows
        if "ref" not in cond:
            layout = SeqLayout((num_img,) * num_rows, layout_txt, ids.shape[0])
            return Static(layout, static, {"rope": self._rotations(ids)[None]})
        num_ref = cond["ref_ids"][..., 0].count_nonzero(dim=1).tolist()
        longest, padded = max(num_ref), cond["ref"].shape[1]
        static["ref"] = F.pad(self.img_in(cond["ref"][:, :longest]), (0, 0, 0, padded - longest))
        all_ids = torch.cat((ids.expand(num_rows, -1, -1), cond["ref_ids"].to(ids)), dim=1)
        static["rope"] = torch.stack([self._rotations(own) for own in all_ids])
        layout = SeqLayout(tuple(num_img + n for n in num_ref), layout_txt, all_ids.shape[1], num_txt)
        return Static(layout, static)

    def _rotations(self, ids: Tensor) -> Tensor:
        return rope_table(ids, self.params.axes_dims_rope)[:, None, None]  # [L, 1, 1, K/2]

    def _embed_channels(self, channels: Tensor) -> Tensor:
        num_latent = self.params.in_channels - channels.shape[-1]
        return linear(channels, self.img_in.weight[:, num_latent:], self.img_in.bias, ops=self.ops)

    def prepare_mod(self, timesteps: Tensor, cond: Cond) -> ModTable:
        """Modulation vectors of the times ``timesteps`` [steps], 0 to 1, in the latents' dtype."""
        # The reference scales by 1000 in the latents' dtype, so the rounding is part of the model.
        vec = self.time_in(timestep_embedding(timesteps * 1000, TIME_CHANNELS).to(self.dtype)[:, None])
        if self.guidance_in is not None:
            guidance = timestep_embedding(cond["guidance"].to(self.dtype) * 1000, TIME_CHANNELS).to(self.dtype)
            vec = vec + self.guidance_in(guidance[:, None]).transpose(0, 1)
        vec = vec + self.vector_in(cond["pooled"][:, None]).transpose(0, 1)  # [steps, R, D]
        num_steps, num_rows, dim = vec.shape
        vec = F.silu(vec).reshape(num_steps * num_rows, 1, dim)

        def vectors(layer: nn.Module, scales: tuple[int, ...]) -> Tensor:
            table: Tensor = layer(vec).view(num_steps, num_rows, -1, dim)
            table[:, :, scales] += 1
            return table

        return ModTable(
            (
                *(vectors(layer, (1, 4, 7, 10)) for layer in self.double_mods),
                *(vectors(layer, (1,)) for layer in self.single_mods),
                vectors(self.head_mod, (0,)),
            )
        )

    def embed(self, rows: Rows) -> Streams:
        """Packed latents [R, Li, 4C] to hidden image tokens, references after them; the text comes projected."""
        static, latents = rows.static.rows, rows.latents
        if "channels" in static:
            weight = self.img_in.weight[:, : latents.shape[-1]]
            img = linear(latents, weight, None, ops=self.ops) + static["channels"]
        else:
            img = self.img_in(latents)
        if "ref" in static:
            longest = max(rows.layout.img) - img.shape[1]  # of these rows, which may be shorter than what was padded
            img = torch.cat((img, static["ref"][:, :longest]), dim=1)
        return Streams(img, static["txt"])

    def head(self, x: Streams, rows: Rows) -> Tensor:
        """Hidden image tokens to the velocity [R, Li, out_channels]."""
        scale, shift = rows.mod[-1].split(1, dim=1)
        return self.img_out(modulate(x.img[:, : rows.latents.shape[1]], shift, scale))

    rules = (
        *plain("img_in", "x_embedder"),
        *plain("txt_in", "context_embedder"),
        *plain("time_in.fc_in", "time_text_embed.timestep_embedder.linear_1"),
        *plain("time_in.fc_out", "time_text_embed.timestep_embedder.linear_2"),
        *plain("guidance_in.fc_in", "time_text_embed.guidance_embedder.linear_1"),
        *plain("guidance_in.fc_out", "time_text_embed.guidance_embedder.linear_2"),
        *plain("vector_in.fc_in", "time_text_embed.text_embedder.linear_1"),
        *plain("vector_in.fc_out", "time_text_embed.text_embedder.linear_2"),
        *fused(
            "double_mods.{}",
            ("transformer_blocks.{}.norm1.linear", "transformer_blocks.{}.norm1_context.linear"),
            parts=(1,) * DOUBLE_MOD,
            shard=None,
        ),
        *fused(
            "double_blocks.{}.img.qkv",
            tuple(f"transformer_blocks.{{}}.attn.to_{name}" for name in "qkv"),
            parts=(1, 1, 1),
        ),
        *fused(
            "double_blocks.{}.txt.qkv",
            tuple(f"transformer_blocks.{{}}.attn.add_{name}_proj" for name in "qkv"),
            parts=(1, 1, 1),
        ),
        qk_scale("double_blocks.{}.img", "transformer_blocks.{}.attn.norm_q", "transformer_blocks.{}.attn.norm_k"),
        qk_scale(
            "double_blocks.{}.txt", "transformer_blocks.{}.attn.norm_added_q", "transformer_blocks.{}.attn.norm_added_k"
        ),
        *plain("double_blocks.{}.img.proj", "transformer_blocks.{}.attn.to_out.0", shard="row"),
        *plain("double_blocks.{}.txt.proj", "transformer_blocks.{}.attn.to_add_out", shard="row"),
        *plain("double_blocks.{}.img.mlp.fc_in", "transformer_blocks.{}.ff.net.0.proj", shard="col"),
        *plain("double_blocks.{}.img.mlp.fc_out", "transformer_blocks.{}.ff.net.2", shard="row"),
        *plain("double_blocks.{}.txt.mlp.fc_in", "transformer_blocks.{}.ff_context.net.0.proj", shard="col"),
        *plain("double_blocks.{}.txt.mlp.fc_out", "transformer_blocks.{}.ff_context.net.2", shard="row"),
        *plain("single_mods.{}", "single_transformer_blocks.{}.norm.linear"),
        *fused(
            "single_blocks.{}.linear1",
            (
                *(f"single_transformer_blocks.{{}}.attn.to_{name}" for name in "qkv"),
                "single_transformer_blocks.{}.proj_mlp",
            ),
            parts=(1, 1, 1, MLP_RATIO),
        ),
        WeightRule(
            "single_blocks.{}.linear2.weight", ("single_transformer_blocks.{}.proj_out.weight",), "row", (1, MLP_RATIO)
        ),
        WeightRule("single_blocks.{}.linear2.bias", ("single_transformer_blocks.{}.proj_out.bias",)),
        qk_scale(
            "single_blocks.{}", "single_transformer_blocks.{}.attn.norm_q", "single_transformer_blocks.{}.attn.norm_k"
        ),
        *plain("head_mod", "norm_out.linear"),
        *plain("img_out", "proj_out"),
    )
    streamed = ("time_in", "guidance_in", "vector_in", "double_mods", "single_mods", "head_mod")


def position_ids(num_text: int, height: int, width: int, device: torch.device) -> Tensor:
    """Coordinates (0, row, column) of the joint sequence [L, 3]; text tokens stand at the origin."""
    ids = torch.zeros(num_text + height * width, 3, device=device)
    ids[num_text:, 1] = torch.arange(height, device=device).repeat_interleave(width)
    ids[num_text:, 2] = torch.arange(width, device=device).repeat(height)
    return ids


NETWORK = FluxNetwork
