"""FLUX.1 in single files: names of the authors' layout, sizes from shapes, pipelines by the input's width."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kdit.errors import CheckpointError
from kdit.models.single_file.family import Config, PipelineForm, Shapes, SingleFileFamily, num_indices
from kdit.models.single_file.name_rule import layer, named
from kdit.models.single_file.vae_kl import kl_autoencoder

_SINGLE = "single_transformer_blocks.{}"
_BLOCK = "transformer_blocks.{}"

RULES = (
    *layer("img_in", "x_embedder"),
    *layer("txt_in", "context_embedder"),
    *layer("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"),
    *layer("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2"),
    *layer("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1"),
    *layer("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2"),
    *layer("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
    *layer("vector_in.out_layer", "time_text_embed.text_embedder.linear_2"),
    *layer("double_blocks.{}.img_mod.lin", f"{_BLOCK}.norm1.linear"),
    *layer("double_blocks.{}.txt_mod.lin", f"{_BLOCK}.norm1_context.linear"),
    *layer("double_blocks.{}.img_attn.qkv", *(f"{_BLOCK}.attn.to_{n}" for n in "qkv")),
    *layer("double_blocks.{}.txt_attn.qkv", *(f"{_BLOCK}.attn.add_{n}_proj" for n in "qkv")),
    *named("double_blocks.{}.img_attn.norm.query_norm.scale", f"{_BLOCK}.attn.norm_q.weight"),
    *named("double_blocks.{}.img_attn.norm.key_norm.scale", f"{_BLOCK}.attn.norm_k.weight"),
    *named("double_blocks.{}.txt_attn.norm.query_norm.scale", f"{_BLOCK}.attn.norm_added_q.weight"),
    *named("double_blocks.{}.txt_attn.norm.key_norm.scale", f"{_BLOCK}.attn.norm_added_k.weight"),
    *layer("double_blocks.{}.img_attn.proj", f"{_BLOCK}.attn.to_out.0"),
    *layer("double_blocks.{}.txt_attn.proj", f"{_BLOCK}.attn.to_add_out"),
    *layer("double_blocks.{}.img_mlp.0", f"{_BLOCK}.ff.net.0.proj"),
    *layer("double_blocks.{}.img_mlp.2", f"{_BLOCK}.ff.net.2"),
    *layer("double_blocks.{}.txt_mlp.0", f"{_BLOCK}.ff_context.net.0.proj"),
    *layer("double_blocks.{}.txt_mlp.2", f"{_BLOCK}.ff_context.net.2"),
    *layer("single_blocks.{}.modulation.lin", f"{_SINGLE}.norm.linear"),
    *layer(
        "single_blocks.{}.linear1",
        *(f"{_SINGLE}.attn.to_{n}" for n in "qkv"),
        f"{_SINGLE}.proj_mlp",
        parts=(1, 1, 1, 4),
    ),
    *layer("single_blocks.{}.linear2", f"{_SINGLE}.proj_out"),
    *named("single_blocks.{}.norm.query_norm.scale", f"{_SINGLE}.attn.norm_q.weight"),
    *named("single_blocks.{}.norm.key_norm.scale", f"{_SINGLE}.attn.norm_k.weight"),
    *layer("final_layer.linear", "proj_out"),
    *layer("final_layer.adaLN_modulation.1", "norm_out.linear", change="swap_halves"),  # shift, scale there
)

COMPONENTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "T5TokenizerFast"),
    "vae": ("diffusers", "AutoencoderKL"),
}
ROPE_AXES = {128: (16, 56, 56)}  # of the published models, by head dim


def config_from_shapes(shapes: Shapes, like: Mapping[str, object]) -> Config:
    """The network's config; the rotary axes are None where the heads do not tell them and ``like`` does not either."""
    dim, in_channels = shapes["x_embedder.weight"]
    (head_dim,) = shapes["transformer_blocks.0.attn.norm_q.weight"]
    axes = like.get("axes_dims_rope") if like.get("attention_head_dim", 128) == head_dim else None
    if not isinstance(axes, list | tuple):
        axes = ROPE_AXES.get(head_dim)
    return {
        "patch_size": 1,
        "in_channels": in_channels,
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": num_indices(shapes, "transformer_blocks"),
        "num_single_layers": num_indices(shapes, "single_transformer_blocks"),
        "attention_head_dim": head_dim,
        "num_attention_heads": dim // head_dim,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        "axes_dims_rope": None if axes is None else list(axes),
    }


def forms(config: Mapping[str, object], given: Collection[str]) -> tuple[PipelineForm, ...]:
    """Latents alone: text to image, or Kontext, which has the same shapes. Twice as wide: Control.
    Wider: Fill, whose input holds masked latents and the mask of 8x8 pixels per latent.
    """
    in_channels, latent = config["in_channels"], config["out_channels"]
    assert isinstance(in_channels, int) and isinstance(latent, int)
    if in_channels == latent:
        names: tuple[str, ...] = ("FluxPipeline", "FluxKontextPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline")
    elif in_channels == 2 * latent:
        names = ("FluxControlPipeline",)
    elif in_channels > 2 * latent:
        names = ("FluxFillPipeline",)
    else:
        raise CheckpointError(
            f"FLUX.1 with {in_channels} channels in and {latent} out: expected the same, twice as many (Control)"
            " or more (Fill)"
        )
    return tuple(PipelineForm(name, COMPONENTS) for name in names)


def scheduler_config(config: Mapping[str, object]) -> Config:
    """As published with FLUX.1-dev; with FLUX.1-schnell, which has no guidance input, without any shift."""
    distilled = bool(config.get("guidance_embeds"))
    return {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 3.0 if distilled else 1.0,
        "use_dynamic_shifting": distilled,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
    }


SINGLE_FILE = SingleFileFamily(
    title="FLUX.1",
    network_class="FluxTransformer2DModel",
    stored_marks=("double_blocks.0.img_attn.qkv.weight", "vector_in.in_layer.weight", "final_layer.linear.weight"),
    diffusers_marks=(
        "transformer_blocks.0.attn.add_q_proj.weight",
        "x_embedder.weight",
        "time_text_embed.text_embedder.linear_1.weight",
    ),
    rules=lambda names: RULES,
    config=config_from_shapes,
    forms=forms,
    scheduler=scheduler_config,
    components=COMPONENTS,
    text_parts={"clip_l": "text_encoder", "t5xxl": "text_encoder_2"},
    untold=("axes_dims_rope",),
    vae=kl_autoencoder(scaling_factor=0.3611, shift_factor=0.1159),
)
