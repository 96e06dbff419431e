"""The configurations of the tiny FLUX-format model, and fresh modules built from them."""

import torch
from diffusers import FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from text import CLIP_LENGTH, CLIP_VOCAB, T5_VOCAB

TRANSFORMER = dict(
    patch_size=1,
    in_channels=64,
    num_layers=2,
    num_single_layers=4,
    attention_head_dim=32,
    num_attention_heads=8,
    joint_attention_dim=192,
    pooled_projection_dim=128,
    guidance_embeds=False,
    axes_dims_rope=(8, 12, 12),
)
T5 = dict(
    vocab_size=T5_VOCAB,
    d_model=192,
    d_kv=48,
    num_heads=4,
    d_ff=384,
    num_layers=2,
    feed_forward_proj="gated-gelu",
    dropout_rate=0.0,
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
    tie_word_embeddings=False,
)
CLIP = dict(
    vocab_size=CLIP_VOCAB,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=CLIP_LENGTH,
    hidden_act="quick_gelu",
    projection_dim=128,
    attention_dropout=0.0,
    bos_token_id=CLIP_VOCAB - 2,
    eos_token_id=CLIP_VOCAB - 1,
    pad_token_id=CLIP_VOCAB - 1,
)


class TextToLatent(torch.nn.Module):
    """Everything that is trained in the transformer stage."""

    def __init__(self):
        super().__init__()
        self.transformer = FluxTransformer2DModel(**TRANSFORMER)
        self.text_encoder = CLIPTextModel(CLIPTextConfig(**CLIP))
        self.text_encoder_2 = T5EncoderModel(T5Config(**T5))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """DiT initialisation: residual branches and the output start at zero.

        The CLIP model starts as a bag of words: its end token looks at all words equally and copies their embeddings.
        (From the usual initialisation its pooled output is nearly the same for all prompts, and stays so for long.)
        """
        clip = self.text_encoder
        clip = getattr(clip, "text_model", clip)
        torch.nn.init.normal_(clip.embeddings.token_embedding.weight)
        clip.embeddings.token_embedding.weight[-2:].mul_(0.1)  # start and end token
        for layer in clip.encoder.layers:
            torch.nn.init.normal_(layer.self_attn.q_proj.weight, std=0.01)
            torch.nn.init.normal_(layer.self_attn.k_proj.weight, std=0.01)
            torch.nn.init.orthogonal_(layer.self_attn.v_proj.weight)
            layer.self_attn.out_proj.weight.copy_(4 * layer.self_attn.v_proj.weight.T)
        tr = self.transformer
        for module in tr.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.xavier_uniform_(module.weight)
                torch.nn.init.zeros_(module.bias)
        for block in tr.transformer_blocks:
            for norm in (block.norm1, block.norm1_context):
                torch.nn.init.zeros_(norm.linear.weight)
        for block in tr.single_transformer_blocks:
            torch.nn.init.zeros_(block.norm.linear.weight)
        torch.nn.init.zeros_(tr.norm_out.linear.weight)
        torch.nn.init.zeros_(tr.proj_out.weight)


def count(module: torch.nn.Module) -> float:
    return sum(p.numel() for p in module.parameters()) / 1e6


if __name__ == "__main__":
    m = TextToLatent()
    for name, part in m.named_children():
        print(f"{name}: {count(part):.2f} M")
