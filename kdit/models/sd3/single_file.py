"""SD3 and SD3.5 in single files: names of the authors' layout and sizes from shapes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from kdit.models.single_file.family import Config, PipelineForm, Shapes, SingleFileFamily, num_indices
from kdit.models.single_file.name_rule import NameRule, layer, named
from kdit.models.single_file.vae_kl import kl_autoencoder

_BLOCK = "transformer_blocks.{}"


def _attention(stored: str, attn: str, norm: str, projections: tuple[str, str, str], out: str) -> tuple[NameRule, ...]:
    """The rules of one stream's part in one attention."""
    return (
        *layer(f"joint_blocks.{{}}.{stored}.qkv", *(f"{_BLOCK}.{attn}.{name}" for name in projections)),
        *named(f"joint_blocks.{{}}.{stored}.ln_q.weight", f"{_BLOCK}.{attn}.{norm}_q.weight"),
        *named(f"joint_blocks.{{}}.{stored}.ln_k.weight", f"{_BLOCK}.{attn}.{norm}_k.weight"),
        *layer(f"joint_blocks.{{}}.{stored}.proj", f"{_BLOCK}.{attn}.{out}"),
    )


RULES = (
    *layer("x_embedder.proj", "pos_embed.proj"),
    *named("pos_embed", "pos_embed.pos_embed"),
    *layer("context_embedder", "context_embedder"),
    *layer("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1"),
    *layer("t_embedder.mlp.2", "time_text_embed.timestep_embedder.linear_2"),
    *layer("y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
    *layer("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2"),
    *_attention("x_block.attn", "attn", "norm", ("to_q", "to_k", "to_v"), "to_out.0"),
    *_attention("context_block.attn", "attn", "norm_added", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out"),
    *_attention("x_block.attn2", "attn2", "norm", ("to_q", "to_k", "to_v"), "to_out.0"),
    *layer("joint_blocks.{}.x_block.adaLN_modulation.1", f"{_BLOCK}.norm1.linear"),
    *layer("joint_blocks.{}.context_block.adaLN_modulation.1", f"{_BLOCK}.norm1_context.linear"),
    *layer("joint_blocks.{}.x_block.mlp.fc1", f"{_BLOCK}.ff.net.0.proj"),
    *layer("joint_blocks.{}.x_block.mlp.fc2", f"{_BLOCK}.ff.net.2"),
    *layer("joint_blocks.{}.context_block.mlp.fc1", f"{_BLOCK}.ff_context.net.0.proj"),
    *layer("joint_blocks.{}.context_block.mlp.fc2", f"{_BLOCK}.ff_context.net.2"),
    *layer("final_layer.linear", "proj_out"),
    *layer("final_layer.adaLN_modulation.1", "norm_out.linear", change="swap_halves"),  # shift, scale there
)

COMPONENTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_3": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "CLIPTokenizer"),
    "tokenizer_3": ("transformers", "T5TokenizerFast"),
    "vae": ("diffusers", "AutoencoderKL"),
}
HEAD_DIM = 64  # of the published models


def rules(names: Collection[str]) -> tuple[NameRule, ...]:
    """The table, with the last block's text modulation, which is shift, scale and nothing more there."""
    last = num_indices(names, "joint_blocks") - 1
    return (
        *layer(
            f"joint_blocks.{last}.context_block.adaLN_modulation.1",
            f"transformer_blocks.{last}.norm1_context.linear",
            change="swap_halves",
        ),
        *RULES,
    )


def config_from_shapes(shapes: Shapes, like: Mapping[str, object]) -> Config:
    """The network's config; the heads are None where shapes do not tell them and ``like`` does not either."""
    dim, channels, patch_size, _ = shapes["pos_embed.proj.weight"]
    num_layers = num_indices(shapes, "transformer_blocks")
    norm = shapes.get("transformer_blocks.0.attn.norm_q.weight")
    head_dim = norm[0] if norm else _head_dim(dim, like)
    return {
        "patch_size": patch_size,
        "in_channels": channels,
        "out_channels": channels,
        "num_layers": num_layers,
        "attention_head_dim": head_dim,
        "num_attention_heads": None if head_dim is None else dim // head_dim,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "caption_projection_dim": shapes["context_embedder.weight"][0],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "pos_embed_max_size": math.isqrt(shapes["pos_embed.pos_embed"][1]),
        "dual_attention_layers": [
            i for i in range(num_layers) if f"transformer_blocks.{i}.attn2.to_q.weight" in shapes
        ],
        "qk_norm": "rms_norm" if norm else None,
    }


def _head_dim(dim: int, like: Mapping[str, object]) -> int | None:
    """Without norms of queries and keys no shape shows the heads."""
    heads, head_dim = like.get("num_attention_heads"), like.get("attention_head_dim")
    if isinstance(heads, int) and isinstance(head_dim, int) and heads * head_dim == dim:
        return head_dim
    return None if dim % HEAD_DIM else HEAD_DIM


def forms(config: Mapping[str, object], given: Collection[str]) -> tuple[PipelineForm, ...]:
    """All pipelines of the family take the same network."""
    return tuple(PipelineForm(f"StableDiffusion3{task}Pipeline", COMPONENTS) for task in ("", "Img2Img", "Inpaint"))


def scheduler_config(config: Mapping[str, object]) -> Config:
    """As published with all models of the family."""
    return {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}


SINGLE_FILE = SingleFileFamily(
    title="Stable Diffusion 3",
    network_class="SD3Transformer2DModel",
    stored_marks=("joint_blocks.0.x_block.attn.qkv.weight", "y_embedder.mlp.0.weight", "pos_embed"),
    diffusers_marks=("transformer_blocks.0.attn.add_q_proj.weight", "pos_embed.pos_embed"),
    rules=rules,
    config=config_from_shapes,
    forms=forms,
    scheduler=scheduler_config,
    components=COMPONENTS,
    text_parts={"clip_l": "text_encoder", "clip_g": "text_encoder_2", "t5xxl": "text_encoder_3"},
    vae=kl_autoencoder(scaling_factor=1.5305, shift_factor=0.0609),
    optional={"text_encoder_3": ("tokenizer_3",)},
    untold=("attention_head_dim",),
)
