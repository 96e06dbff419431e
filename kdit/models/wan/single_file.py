"""Wan 2.1 and 2.2 in single files: names of the authors' layout, sizes from shapes, pipelines by the inputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from kdit.models.single_file.family import Config, PipelineForm, Shapes, SingleFileFamily, num_indices
from kdit.models.single_file.name_rule import layer, named
from kdit.models.wan.vae_file import AUTOENCODER

_IMAGE = "condition_embedder.image_embedder"

RULES = (
    *layer("patch_embedding", "patch_embedding"),
    *layer("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    *layer("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    *layer("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    *layer("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    *layer("time_projection.1", "condition_embedder.time_proj"),
    *named("img_emb.emb_pos", f"{_IMAGE}.pos_embed"),
    *layer("img_emb.proj.0", f"{_IMAGE}.norm1"),
    *layer("img_emb.proj.1", f"{_IMAGE}.ff.net.0.proj"),
    *layer("img_emb.proj.3", f"{_IMAGE}.ff.net.2"),
    *layer("img_emb.proj.4", f"{_IMAGE}.norm2"),
    *(
        rule
        for stored, attn in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for theirs, ours in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
        for rule in layer(f"blocks.{{}}.{stored}.{theirs}", f"blocks.{{}}.{attn}.{ours}")
    ),
    *(
        rule
        for stored, attn in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for n in "qk"
        for rule in named(f"blocks.{{}}.{stored}.norm_{n}.weight", f"blocks.{{}}.{attn}.norm_{n}.weight")
    ),
    *layer("blocks.{}.cross_attn.k_img", "blocks.{}.attn2.add_k_proj"),
    *layer("blocks.{}.cross_attn.v_img", "blocks.{}.attn2.add_v_proj"),
    *named("blocks.{}.cross_attn.norm_k_img.weight", "blocks.{}.attn2.norm_added_k.weight"),
    *layer("blocks.{}.norm3", "blocks.{}.norm2"),
    *named("blocks.{}.modulation", "blocks.{}.scale_shift_table"),
    *layer("blocks.{}.ffn.0", "blocks.{}.ffn.net.0.proj"),
    *layer("blocks.{}.ffn.2", "blocks.{}.ffn.net.2"),
    *named("head.modulation", "scale_shift_table"),
    *layer("head.head", "proj_out"),
)

COMPONENTS = {
    "scheduler": ("diffusers", "UniPCMultistepScheduler"),
    "text_encoder": ("transformers", "UMT5EncoderModel"),
    "tokenizer": ("transformers", "T5TokenizerFast"),
    "vae": ("diffusers", "AutoencoderKLWan"),
}
IMAGE_ENCODER = {
    "image_encoder": ("transformers", "CLIPVisionModel"),
    "image_processor": ("transformers", "CLIPImageProcessor"),
}
SECOND_EXPERT = {"transformer_2": ("diffusers", "WanTransformer3DModel")}
HEAD_DIM = 128  # of the published models
WIDE_LATENTS = 48  # channels of the 2.2 autoencoder, which is for the 5B model alone
BOUNDARY_T2V, BOUNDARY_I2V = 0.875, 0.9  # where the experts of 2.2 change over


def config_from_shapes(shapes: Shapes, like: Mapping[str, object]) -> Config:
    """The network's config; the heads are None where shapes do not tell them and ``like`` does not either."""
    dim, in_channels, *patch = shapes["patch_embedding.weight"]
    head_dim = _head_dim(dim, like)
    image, positions = shapes.get(f"{_IMAGE}.norm1.weight"), shapes.get(f"{_IMAGE}.pos_embed")
    config: Config = {
        "patch_size": patch,
        "num_attention_heads": None if head_dim is None else dim // head_dim,
        "attention_head_dim": head_dim,
        "in_channels": in_channels,
        "out_channels": shapes["proj_out.weight"][0] // math.prod(patch),
        "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
        "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "num_layers": num_indices(shapes, "blocks"),
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "image_dim": image[0] if image else None,
        "added_kv_proj_dim": dim if image else None,
        "pos_embed_seq_len": positions[1] if positions else None,
    }
    return config | {name: like[name] for name in ("eps", "rope_max_seq_len") if name in like}


def _head_dim(dim: int, like: Mapping[str, object]) -> int | None:
    """Queries and keys are normalised across heads, so no shape shows the heads."""
    heads, head_dim = like.get("num_attention_heads"), like.get("attention_head_dim")
    if isinstance(heads, int) and isinstance(head_dim, int) and heads * head_dim == dim:
        return head_dim
    return None if dim % HEAD_DIM else HEAD_DIM


def forms(config: Mapping[str, object], given: Collection[str]) -> tuple[PipelineForm, ...]:
    """Frames in the input: image to video, of 2.1 with an image encoder, of 2.2 with two experts.
    Latents of the 2.2 autoencoder: the 5B model, which does both. Else text to video, with two experts if two
    are given.
    """
    two = "transformer_2" in given
    if config["out_channels"] == WIDE_LATENTS:
        options = {"expand_timesteps": True}
        return (
            PipelineForm("WanPipeline", COMPONENTS, options),
            PipelineForm("WanImageToVideoPipeline", COMPONENTS, options),
        )
    if config["in_channels"] == config["out_channels"]:
        if two:
            return (PipelineForm("WanPipeline", COMPONENTS | SECOND_EXPERT, {"boundary_ratio": BOUNDARY_T2V}),)
        return (PipelineForm("WanPipeline", COMPONENTS),)
    if config["image_dim"] is not None:
        return (PipelineForm("WanImageToVideoPipeline", COMPONENTS | IMAGE_ENCODER),)
    options_i2v = {"boundary_ratio": BOUNDARY_I2V}
    return (PipelineForm("WanImageToVideoPipeline", COMPONENTS | SECOND_EXPERT, options_i2v),)


def scheduler_config(config: Mapping[str, object]) -> Config:
    """UniPC as published. The shift is that of the 480p models and of 2.2 A14B, 3; of the 5B model, 5.

    No shape tells a 2.1 model for 720p from one for 480p: its shift, 5, comes from a scheduler folder.
    """
    return {
        "_class_name": "UniPCMultistepScheduler",
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": 5.0 if config.get("out_channels") == WIDE_LATENTS else 3.0,
    }


SINGLE_FILE = SingleFileFamily(
    title="Wan",
    network_class="WanTransformer3DModel",
    stored_marks=("blocks.0.self_attn.q.weight", "time_projection.1.weight", "head.modulation"),
    diffusers_marks=("blocks.0.attn1.to_q.weight", "condition_embedder.time_proj.weight", "scale_shift_table"),
    rules=lambda names: RULES,
    config=config_from_shapes,
    forms=forms,
    scheduler=scheduler_config,
    components=COMPONENTS,
    vae=AUTOENCODER,
    text_parts={"umt5xxl": "text_encoder"},
    untold=("attention_head_dim",),
)
