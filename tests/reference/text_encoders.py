"""Tiny text and vision-language encoders shared by several families."""

from __future__ import annotations

from typing import Any

import transformers

from tests.reference.tokenizers import QWEN_CHAT_TEMPLATE, t5_tokenizer
from tests.reference.weights import DEEP_GAINS, randomise


def clip_text(
    seed: int, tokenizer: Any, hidden: int = 96, projection: int | None = None, act: str = "quick_gelu"
) -> transformers.PreTrainedModel:
    """CLIP text encoder. ``eos_token_id=2`` is the legacy value of the published configs: the pooled
    state is then taken at the position of the HIGHEST token id."""
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden + 40,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=projection or hidden,
        hidden_act=act,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    cls = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return randomise(cls(config), seed)


def t5_encoder(seed: int, tokenizer: Any, d_model: int = 56, umt5: bool = False) -> transformers.PreTrainedModel:
    """T5 v1.1 (or UMT5: a relative-position table in every layer) encoder; its inner width 64 differs
    from d_model. T5 attention has no 1/sqrt(d), so the query gain is turned down as in the real one."""
    options = dict(
        vocab_size=len(tokenizer),
        d_model=d_model,
        d_kv=16,
        d_ff=d_model + 48,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    gains = {r"SelfAttention\.q\.": 0.3}
    if umt5:
        return randomise(transformers.UMT5EncoderModel(transformers.UMT5Config(**options)), seed, gains)
    return randomise(transformers.T5EncoderModel(transformers.T5Config(**options)), seed, gains)


def qwen3_causal(seed: int, tokenizer: Any, layers: int, hidden: int = 64) -> transformers.PreTrainedModel:
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=88,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    return randomise(transformers.Qwen3ForCausalLM(config), seed, DEEP_GAINS)


def _vision_ids(tokenizer: Any) -> dict[str, int]:
    ids = tokenizer.convert_tokens_to_ids
    return dict(
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )


def qwen25_vl(seed: int, tokenizer: Any, hidden: int = 64) -> transformers.PreTrainedModel:
    """Qwen2.5-VL: windowed and full vision blocks, M-RoPE, grouped keys (4 query heads, 2 key heads)."""
    config = transformers.Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=88,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]},
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
            pad_token_id=tokenizer.pad_token_id,
        ),
        vision_config=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=56,
            num_heads=2,
            patch_size=14,
            spatial_merge_size=2,
            temporal_patch_size=2,
            window_size=112,
            fullatt_block_indexes=[1],
            out_hidden_size=hidden,
        ),
        **_vision_ids(tokenizer),
    )
    return randomise(transformers.Qwen2_5_VLForConditionalGeneration(config), seed)


def qwen3_vl(seed: int, tokenizer: Any, layers: int, hidden: int = 64) -> transformers.PreTrainedModel:
    """Qwen3-VL: deepstack features into the first text layers, interleaved M-RoPE, q/k norm."""
    config = transformers.Qwen3VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=88,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            max_position_embeddings=8192,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_section": [6, 3, 3],
                "mrope_interleaved": True,
            },
            pad_token_id=tokenizer.pad_token_id,
        ),
        vision_config=dict(
            depth=3,
            hidden_size=32,
            intermediate_size=56,
            num_heads=2,
            patch_size=16,
            spatial_merge_size=2,
            temporal_patch_size=2,
            out_hidden_size=hidden,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
        ),
        **_vision_ids(tokenizer),
    )
    return randomise(transformers.Qwen3VLForConditionalGeneration(config), seed, DEEP_GAINS)


def qwen2_vl_processor(tokenizer: Any) -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=14),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(patch_size=14),
        chat_template=QWEN_CHAT_TEMPLATE,
    )


def qwen3_vl_processor(tokenizer: Any) -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    half = [0.5, 0.5, 0.5]
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=16,
            image_mean=half,
            image_std=half,
            size={"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(
            patch_size=16, size={"shortest_edge": 64 * 64, "longest_edge": 4 * 192 * 192}
        ),
        chat_template=QWEN_CHAT_TEMPLATE,
    )


def t5_pair(seed: int) -> dict[str, Any]:
    tokenizer = t5_tokenizer()
    return dict(tokenizer=tokenizer, text_encoder=t5_encoder(seed, tokenizer, umt5=True))
