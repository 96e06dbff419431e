"""Networks and autoencoders written in their authors' layouts, by hand: the names as the authors' code has them.

diffusers' own converters judge these writers in test_layouts.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def halves_swapped(tensor: Tensor) -> Tensor:
    first, second = tensor.chunk(2)
    return torch.cat((second, first))


def count(tensors: Tensors, prefix: str) -> int:
    return len({name.split(".")[prefix.count(".")] for name in tensors if name.startswith(prefix)})


def renamed(tensors: Tensors, table: list[tuple[str, str]]) -> Tensors:
    """Each name through the first pattern that it begins with."""
    found = {}
    for name, tensor in tensors.items():
        pattern, new = next(row for row in table if re.match(row[0], name))
        found[re.sub(pattern, new, name, count=1)] = tensor
    return found


def pop_joined(tensors: Tensors, names: list[str], leaf: str) -> Tensor:
    return torch.cat([tensors.pop(f"{name}.{leaf}") for name in names])


def flux(diffusers: Tensors) -> Tensors:
    rest, out = dict(diffusers), {}
    for leaf in ("weight", "bias"):
        for i in range(count(diffusers, "transformer_blocks.")):
            attn = f"transformer_blocks.{i}.attn"
            out[f"double_blocks.{i}.img_attn.qkv.{leaf}"] = pop_joined(rest, [f"{attn}.to_{n}" for n in "qkv"], leaf)
            text = [f"{attn}.add_{n}_proj" for n in "qkv"]
            out[f"double_blocks.{i}.txt_attn.qkv.{leaf}"] = pop_joined(rest, text, leaf)
        for i in range(count(diffusers, "single_transformer_blocks.")):
            block = f"single_transformer_blocks.{i}"
            names = [*(f"{block}.attn.to_{n}" for n in "qkv"), f"{block}.proj_mlp"]
            out[f"single_blocks.{i}.linear1.{leaf}"] = pop_joined(rest, names, leaf)
        out[f"final_layer.adaLN_modulation.1.{leaf}"] = halves_swapped(rest.pop(f"norm_out.linear.{leaf}"))
    table = [
        (r"x_embedder", "img_in"),
        (r"context_embedder", "txt_in"),
        (r"time_text_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
        (r"time_text_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
        (r"time_text_embed\.guidance_embedder\.linear_1", "guidance_in.in_layer"),
        (r"time_text_embed\.guidance_embedder\.linear_2", "guidance_in.out_layer"),
        (r"time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
        (r"time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
        (r"transformer_blocks\.(\d+)\.norm1\.linear", r"double_blocks.\1.img_mod.lin"),
        (r"transformer_blocks\.(\d+)\.norm1_context\.linear", r"double_blocks.\1.txt_mod.lin"),
        (r"transformer_blocks\.(\d+)\.attn\.norm_q\.weight", r"double_blocks.\1.img_attn.norm.query_norm.scale"),
        (r"transformer_blocks\.(\d+)\.attn\.norm_k\.weight", r"double_blocks.\1.img_attn.norm.key_norm.scale"),
        (r"transformer_blocks\.(\d+)\.attn\.norm_added_q\.weight", r"double_blocks.\1.txt_attn.norm.query_norm.scale"),
        (r"transformer_blocks\.(\d+)\.attn\.norm_added_k\.weight", r"double_blocks.\1.txt_attn.norm.key_norm.scale"),
        (r"transformer_blocks\.(\d+)\.attn\.to_out\.0", r"double_blocks.\1.img_attn.proj"),
        (r"transformer_blocks\.(\d+)\.attn\.to_add_out", r"double_blocks.\1.txt_attn.proj"),
        (r"transformer_blocks\.(\d+)\.ff\.net\.0\.proj", r"double_blocks.\1.img_mlp.0"),
        (r"transformer_blocks\.(\d+)\.ff\.net\.2", r"double_blocks.\1.img_mlp.2"),
        (r"transformer_blocks\.(\d+)\.ff_context\.net\.0\.proj", r"double_blocks.\1.txt_mlp.0"),
        (r"transformer_blocks\.(\d+)\.ff_context\.net\.2", r"double_blocks.\1.txt_mlp.2"),
        (r"single_transformer_blocks\.(\d+)\.norm\.linear", r"single_blocks.\1.modulation.lin"),
        (r"single_transformer_blocks\.(\d+)\.proj_out", r"single_blocks.\1.linear2"),
        (r"single_transformer_blocks\.(\d+)\.attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
        (r"single_transformer_blocks\.(\d+)\.attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
        (r"proj_out", "final_layer.linear"),
    ]
    return out | renamed(rest, table)


def sd3(diffusers: Tensors) -> Tensors:
    rest, out = dict(diffusers), {}
    last = count(diffusers, "transformer_blocks.") - 1
    for leaf in ("weight", "bias"):
        for i in range(last + 1):
            block = f"transformer_blocks.{i}"
            joint = f"joint_blocks.{i}"
            out[f"{joint}.x_block.attn.qkv.{leaf}"] = pop_joined(rest, [f"{block}.attn.to_{n}" for n in "qkv"], leaf)
            text = [f"{block}.attn.add_{n}_proj" for n in "qkv"]
            out[f"{joint}.context_block.attn.qkv.{leaf}"] = pop_joined(rest, text, leaf)
            if f"{block}.attn2.to_q.{leaf}" in rest:
                names = [f"{block}.attn2.to_{n}" for n in "qkv"]
                out[f"{joint}.x_block.attn2.qkv.{leaf}"] = pop_joined(rest, names, leaf)
        out[f"final_layer.adaLN_modulation.1.{leaf}"] = halves_swapped(rest.pop(f"norm_out.linear.{leaf}"))
        text_mod = rest.pop(f"transformer_blocks.{last}.norm1_context.linear.{leaf}")
        out[f"joint_blocks.{last}.context_block.adaLN_modulation.1.{leaf}"] = halves_swapped(text_mod)
    table = [
        (r"pos_embed\.proj", "x_embedder.proj"),
        (r"pos_embed\.pos_embed", "pos_embed"),
        (r"context_embedder", "context_embedder"),
        (r"time_text_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
        (r"time_text_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
        (r"time_text_embed\.text_embedder\.linear_1", "y_embedder.mlp.0"),
        (r"time_text_embed\.text_embedder\.linear_2", "y_embedder.mlp.2"),
        (r"transformer_blocks\.(\d+)\.norm1\.linear", r"joint_blocks.\1.x_block.adaLN_modulation.1"),
        (r"transformer_blocks\.(\d+)\.norm1_context\.linear", r"joint_blocks.\1.context_block.adaLN_modulation.1"),
        (r"transformer_blocks\.(\d+)\.(attn2?)\.norm_([qk])\.weight", r"joint_blocks.\1.x_block.\2.ln_\3.weight"),
        (r"transformer_blocks\.(\d+)\.attn\.norm_added_([qk])", r"joint_blocks.\1.context_block.attn.ln_\2"),
        (r"transformer_blocks\.(\d+)\.(attn2?)\.to_out\.0", r"joint_blocks.\1.x_block.\2.proj"),
        (r"transformer_blocks\.(\d+)\.attn\.to_add_out", r"joint_blocks.\1.context_block.attn.proj"),
        (r"transformer_blocks\.(\d+)\.ff\.net\.0\.proj", r"joint_blocks.\1.x_block.mlp.fc1"),
        (r"transformer_blocks\.(\d+)\.ff\.net\.2", r"joint_blocks.\1.x_block.mlp.fc2"),
        (r"transformer_blocks\.(\d+)\.ff_context\.net\.0\.proj", r"joint_blocks.\1.context_block.mlp.fc1"),
        (r"transformer_blocks\.(\d+)\.ff_context\.net\.2", r"joint_blocks.\1.context_block.mlp.fc2"),
        (r"proj_out", "final_layer.linear"),
    ]
    return out | renamed(rest, table)


def wan(diffusers: Tensors) -> Tensors:
    table = [
        (r"patch_embedding", "patch_embedding"),
        (r"condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
        (r"condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
        (r"condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
        (r"condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
        (r"condition_embedder\.time_proj", "time_projection.1"),
        (r"condition_embedder\.image_embedder\.pos_embed", "img_emb.emb_pos"),
        (r"condition_embedder\.image_embedder\.norm1", "img_emb.proj.0"),
        (r"condition_embedder\.image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
        (r"condition_embedder\.image_embedder\.ff\.net\.2", "img_emb.proj.3"),
        (r"condition_embedder\.image_embedder\.norm2", "img_emb.proj.4"),
        (r"blocks\.(\d+)\.attn1\.to_([qkv])", r"blocks.\1.self_attn.\2"),
        (r"blocks\.(\d+)\.attn2\.to_([qkv])", r"blocks.\1.cross_attn.\2"),
        (r"blocks\.(\d+)\.attn1\.to_out\.0", r"blocks.\1.self_attn.o"),
        (r"blocks\.(\d+)\.attn2\.to_out\.0", r"blocks.\1.cross_attn.o"),
        (r"blocks\.(\d+)\.attn1\.norm_([qk])", r"blocks.\1.self_attn.norm_\2"),
        (r"blocks\.(\d+)\.attn2\.norm_([qk])", r"blocks.\1.cross_attn.norm_\2"),
        (r"blocks\.(\d+)\.attn2\.add_([kv])_proj", r"blocks.\1.cross_attn.\2_img"),
        (r"blocks\.(\d+)\.attn2\.norm_added_k", r"blocks.\1.cross_attn.norm_k_img"),
        (r"blocks\.(\d+)\.norm2", r"blocks.\1.norm3"),
        (r"blocks\.(\d+)\.scale_shift_table", r"blocks.\1.modulation"),
        (r"blocks\.(\d+)\.ffn\.net\.0\.proj", r"blocks.\1.ffn.0"),
        (r"blocks\.(\d+)\.ffn\.net\.2", r"blocks.\1.ffn.2"),
        (r"scale_shift_table", "head.modulation"),
        (r"proj_out", "head.head"),
    ]
    # The reference's attention holds a norm that nothing reads; the authors' files have no such tensor.
    return renamed({name: tensor for name, tensor in diffusers.items() if "norm_added_q" not in name}, table)


def vae(diffusers: Tensors) -> Tensors:
    levels = count(diffusers, "encoder.down_blocks.")
    found = {}
    for name, tensor in diffusers.items():
        new = (
            name.replace("down_blocks.", "down.").replace("resnets.", "block.").replace("conv_shortcut", "nin_shortcut")
        )
        new = re.sub(r"up_blocks\.(\d+)", lambda m: f"up.{levels - 1 - int(m[1])}", new)
        new = re.sub(r"mid_block\.block\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", new)
        new = new.replace("downsamplers.0", "downsample").replace("upsamplers.0", "upsample")
        new = new.replace("conv_norm_out", "norm_out").replace("mid_block.attentions.0.group_norm", "mid.attn_1.norm")
        new = re.sub(r"mid_block\.attentions\.0\.to_([qkv])", r"mid.attn_1.\1", new)
        new = new.replace("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out")
        is_projection = re.search(r"attn_1\.(?:[qkv]|proj_out)\.weight", new)
        found[new] = tensor[:, :, None, None] if is_projection else tensor
    return found


def wan_vae(diffusers: Tensors) -> Tensors:
    resnets = count(diffusers, "decoder.up_blocks.0.resnets.")
    found = {}
    for name, tensor in diffusers.items():
        new = re.sub(r"^quant_conv", "conv1", re.sub(r"^post_quant_conv", "conv2", name))
        new = new.replace("conv_in", "conv1").replace("norm_out", "head.0").replace("conv_out", "head.2")
        blocks = "resnets|upsamplers"
        new = re.sub(
            rf"up_blocks\.(\d)\.({blocks})\.(\d)",
            lambda m: f"upsamples.{int(m[1]) * (resnets + 1) + (int(m[3]) if m[2] == 'resnets' else resnets)}",
            new,
        )
        new = new.replace("down_blocks", "downsamples").replace("mid_block.attentions.0", "middle.1")
        new = new.replace("mid_block.resnets.0", "middle.0").replace("mid_block.resnets.1", "middle.2")
        if "samples." in new or "middle.0" in new or "middle.2" in new:
            for ours, theirs in (("norm1", "residual.0"), ("conv1", "residual.2"), ("norm2", "residual.3")):
                new = new.replace(ours, theirs)
            new = new.replace("conv2", "residual.6").replace("conv_shortcut", "shortcut")
        found[new] = tensor
    return found


WRITERS: dict[str, Callable[[Tensors], Tensors]] = {"flux": flux, "sd3": sd3, "wan": wan}
