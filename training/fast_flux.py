"""A fast training forward for diffusers' FluxTransformer2DModel on CPUs: same parameters, same result.

The module's own forward spends most of a small model's CPU time outside the matrix products (casts, rotary embedding,
norms, concatenations). This one runs in pure bf16 with joined projections, and leaves the element-wise work to a few
small kernels from ``torch.compile``. Rotary pairs are handled as two halves; the rows of the q/k projections are
permuted on the fly, which leaves the attention scores unchanged.
"""

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_timestep_embedding


def _kernel(fn):
    return torch.compile(fn, dynamic=False)


@_kernel
def modulate(x, shift, scale):
    x = F.layer_norm(x.float(), x.shape[-1:], eps=1e-6)
    return (x * (1 + scale.float().unsqueeze(1)) + shift.float().unsqueeze(1)).bfloat16()


@_kernel
def gate_add(x, gate, h):
    return (x.float() + gate.float().unsqueeze(1) * h.float()).bfloat16()


@_kernel
def gelu(x):
    return F.gelu(x.float(), approximate="tanh").bfloat16()


@_kernel
def norm_rope(x, weight, cos, sin):
    """[B, T, H, D] -> RMS norm, rotary embedding (halves) -> [B, H, T, D]"""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    a, b = x.chunk(2, -1)
    x = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return x.bfloat16().transpose(1, 2).contiguous()


@_kernel
def softmax(s, scale):
    return torch.softmax(s.float() * scale, -1).bfloat16()


def attention(q, k, v):
    p = softmax(q @ k.transpose(-1, -2), q.shape[-1] ** -0.5)
    return (p @ v).transpose(1, 2).flatten(2)


def rope_table(model, ids):
    """cos and sin of shape [T, 1, head_dim / 2] in the order of the halves."""
    cos, sin = model.pos_embed(ids)
    return cos[:, None, 0::2].float().contiguous(), sin[:, None, 0::2].float().contiguous()


class FastFlux:
    def __init__(self, model):
        self.m, c = model, model.config
        self.heads, self.hd = c.num_attention_heads, c.attention_head_dim
        head = torch.cat([torch.arange(0, self.hd, 2), torch.arange(1, self.hd, 2)])
        self.head = head
        self.rows = (torch.arange(self.heads)[:, None] * self.hd + head).flatten()

    def project(self, x, q, k, v, extra=()):
        """One matrix product for q, k, v (and more); q and k rows in half order."""
        w = torch.cat([q.weight[self.rows], k.weight[self.rows], v.weight, *(e.weight for e in extra)])
        b = torch.cat([q.bias[self.rows], k.bias[self.rows], v.bias, *(e.bias for e in extra)])
        d = self.heads * self.hd
        return F.linear(x, w, b).split([d, d, d, *(e.out_features for e in extra)], -1)

    def split_heads(self, x):
        return x.unflatten(-1, (self.heads, self.hd))

    def double(self, blk, x, c, temb, rope_x, rope_c):
        sh1, sc1, g1, sh2, sc2, g2 = blk.norm1.linear(temb).chunk(6, -1)
        csh1, csc1, cg1, csh2, csc2, cg2 = blk.norm1_context.linear(temb).chunk(6, -1)
        a, n = blk.attn, c.shape[1]
        q, k, v = map(self.split_heads, self.project(modulate(x, sh1, sc1), a.to_q, a.to_k, a.to_v))
        cq, ck, cv = map(
            self.split_heads, self.project(modulate(c, csh1, csc1), a.add_q_proj, a.add_k_proj, a.add_v_proj)
        )
        h = self.head
        q = torch.cat([norm_rope(cq, a.norm_added_q.weight[h], *rope_c), norm_rope(q, a.norm_q.weight[h], *rope_x)], 2)
        k = torch.cat([norm_rope(ck, a.norm_added_k.weight[h], *rope_c), norm_rope(k, a.norm_k.weight[h], *rope_x)], 2)
        o = attention(q, k, torch.cat([cv, v], 1).transpose(1, 2))
        x = gate_add(x, g1, a.to_out[0](o[:, n:]))
        c = gate_add(c, cg1, a.to_add_out(o[:, :n]))
        x = gate_add(x, g2, blk.ff.net[2](gelu(blk.ff.net[0].proj(modulate(x, sh2, sc2)))))
        c = gate_add(c, cg2, blk.ff_context.net[2](gelu(blk.ff_context.net[0].proj(modulate(c, csh2, csc2)))))
        return x, c

    def single(self, blk, x, temb, rope):
        sh, sc, g = blk.norm.linear(temb).chunk(3, -1)
        a = blk.attn
        q, k, v, m = self.project(modulate(x, sh, sc), a.to_q, a.to_k, a.to_v, (blk.proj_mlp,))
        q = norm_rope(self.split_heads(q), a.norm_q.weight[self.head], *rope)
        k = norm_rope(self.split_heads(k), a.norm_k.weight[self.head], *rope)
        o = attention(q, k, self.split_heads(v).transpose(1, 2))
        return gate_add(x, g, blk.proj_out(torch.cat([o, gelu(m)], -1)))

    def __call__(self, x, context, pooled, t, rope):
        """x [B, 64, 64], context [B, L, D], pooled [B, P]: bf16; t [B] in [0, 1]; rope of text then image tokens."""
        m, n = self.m, context.shape[1]
        te = m.time_text_embed
        temb = te.timestep_embedder(
            get_timestep_embedding(t.float() * 1000, 256, flip_sin_to_cos=True, downscale_freq_shift=0).to(x.dtype)
        )
        temb = F.silu(temb + te.text_embedder(pooled))
        rope_c, rope_x = tuple(r[:n] for r in rope), tuple(r[n:] for r in rope)
        x, c = m.x_embedder(x), m.context_embedder(context)
        for blk in m.transformer_blocks:
            x, c = self.double(blk, x, c, temb, rope_x, rope_c)
        x = torch.cat([c, x], 1)
        for blk in m.single_transformer_blocks:
            x = self.single(blk, x, temb, rope)
        scale, shift = m.norm_out.linear(temb).chunk(2, -1)
        return m.proj_out(modulate(x[:, n:], shift, scale))
