"""CLIP and T5 text encoders in single files: what they are, and their configs from shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kdit.errors import CheckpointError
from kdit.models.single_file.family import Config, Shapes, num_indices
from kdit.models.weights.header import TensorInfo
from kdit.models.weights.recipe import derived

CLIP, CLIP_PROJECTED, T5, UMT5 = (
    "CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel", "UMT5EncoderModel",
)  # fmt: skip
SAME_TENSORS = {CLIP: (CLIP, CLIP_PROJECTED), CLIP_PROJECTED: (CLIP, CLIP_PROJECTED), T5: (T5,), UMT5: (UMT5,)}
"""Classes that can be made of the same tensors."""
_CLIP_MARK, _T5_MARK = "embeddings.token_embedding.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"
_PREFIX, _PROJECTION = "text_model.", "text_projection.weight"  # CLIP's prefix, which newer files leave out
# Not of the encoder: CLIP's temperature, a stored index, a tokenizer that travels along.
_UNREAD = ("logit_scale", "text_model.embeddings.position_ids", "embeddings.position_ids", "spiece_model")
_CLIP_HEAD_DIM = 64
_SMALL_CLIP = 768  # width of ViT-L/14; larger ones were trained with the plain GELU
_T5_BIAS = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"


def recognise_text_encoder(tensors: Mapping[str, TensorInfo]) -> tuple[str, dict[str, TensorInfo]] | None:
    """The class and its tensors under the names of transformers; None if they are of no known text encoder."""
    held = {name: info for name, info in tensors.items() if name not in _UNREAD}
    if f"{_PREFIX}{_CLIP_MARK}" in held or _CLIP_MARK in held:
        named = {
            name if name.startswith((_PREFIX, _PROJECTION)) else f"{_PREFIX}{name}": info for name, info in held.items()
        }
        return CLIP_PROJECTED if _PROJECTION in named else CLIP, _renamed(named)
    if _T5_MARK in held:
        return UMT5 if _T5_BIAS.format(1) in held else T5, _renamed(held)
    return None


def config_from_shapes(class_name: str, shapes: Shapes, like: Mapping[str, object]) -> Config:
    """config.json of the encoder; ``like``: that of a like one, which counts where shapes tell nothing."""
    sizes = _clip_sizes(shapes, like) if class_name in (CLIP, CLIP_PROJECTED) else _t5_sizes(shapes)
    return {**(_CLIP_DEFAULTS if class_name in (CLIP, CLIP_PROJECTED) else _T5_DEFAULTS), **like, **sizes}


# As published with the encoders that these families use.
_CLIP_DEFAULTS: Config = {"model_type": "clip_text_model", "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
_T5_DEFAULTS: Config = {
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": False,
    "tie_word_embeddings": True,  # one table, whichever of its two names is stored
    "relative_attention_max_distance": 128,
}


def _clip_sizes(shapes: Shapes, like: Mapping[str, object]) -> Config:
    vocabulary, dim = shapes[f"{_PREFIX}{_CLIP_MARK}"]
    inner = shapes[f"{_PREFIX}encoder.layers.0.mlp.fc1.weight"][0]
    sizes: Config = {
        "vocab_size": vocabulary,
        "hidden_size": dim,
        "intermediate_size": inner,
        "max_position_embeddings": shapes[f"{_PREFIX}embeddings.position_embedding.weight"][0],
        "num_hidden_layers": num_indices(shapes, f"{_PREFIX}encoder.layers"),
        "projection_dim": shapes[_PROJECTION][0] if _PROJECTION in shapes else dim,
    }
    if like.get("hidden_size") != dim:  # of another encoder
        sizes["num_attention_heads"] = max(dim // _CLIP_HEAD_DIM, 1)
        sizes["hidden_act"] = "quick_gelu" if dim <= _SMALL_CLIP else "gelu"
    return sizes


def _t5_sizes(shapes: Shapes) -> Config:
    vocabulary, dim = shapes["shared.weight"] if "shared.weight" in shapes else shapes["encoder.embed_tokens.weight"]
    buckets, heads = shapes[_T5_BIAS.format(0)]
    return {
        "vocab_size": vocabulary,
        "d_model": dim,
        "d_kv": shapes[_T5_MARK][0] // heads,
        "d_ff": shapes["encoder.block.0.layer.1.DenseReluDense.wo.weight"][1],
        "num_layers": num_indices(shapes, "encoder.block"),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
    }


def _renamed(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    return {name: derived(name, info) for name, info in tensors.items()}


def fit_class(class_name: str, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors that the class takes: a pipeline that reads CLIP's states only has no use for its projection."""
    return {name: info for name, info in tensors.items() if class_name != CLIP or name != _PROJECTION}


def can_be(class_name: str, found: str) -> bool:
    """Whether the tensors of a ``found`` encoder serve as ``class_name``."""
    return found in SAME_TENSORS.get(class_name, ()) and not (class_name == CLIP_PROJECTED and found == CLIP)


def check_class(path: Path, class_name: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse a CLIP without the projection that the pipeline reads."""
    if class_name == CLIP_PROJECTED and _PROJECTION not in tensors:
        raise CheckpointError(f"{path}: the text encoder has no {_PROJECTION}, which {class_name} needs")
