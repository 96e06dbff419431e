"""TEXT_ENCODE: runs the text encoders that its context lists and puts their outputs in that order."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor

from kdit.errors import InputError, NonFiniteError
from kdit.keys import InferNodeType, ModelKey, ModelKind, TensorKey
from kdit.models.text_encoder import TextEncoder
from kdit.nodes.core.factory import InferNodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import InferNode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub

logger = logging.getLogger(__name__)

EncoderOutput = Literal["last_hidden_state", "pooler_output"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderCall:
    """One encoder applied to one text per sample."""

    model: ModelKey
    texts: tuple[str, ...]
    negative_texts: tuple[str, ...] | None  # None: no guidance branch
    max_length: int  # tokens, padding included
    output: EncoderOutput
    on_overflow: Literal["cut", "reject"] = "cut"


class _EncoderOutputs(Protocol):
    last_hidden_state: Tensor
    pooler_output: Tensor


@dataclass(frozen=True)
class TextEncodeSettings:
    """The node's metadata."""

    calls: tuple[EncoderCall, ...]


@InferNodeFactory.register(InferNodeType.TEXT_ENCODE, ModelKey.of_kind(ModelKind.TEXT_ENCODER))
class TextEncodeNode(InferNode):
    """Writes one tensor per call to POSITIVE and to NEGATIVE
    (an empty list if no call has negative texts).
    """

    input_defs: ClassVar[list[PinDef]] = []
    output_defs: ClassVar[list[PinDef]] = [TensorKey.POSITIVE, TensorKey.NEGATIVE]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Encode every distinct text once, by itself, so that it does not depend on its neighbours."""
        calls = read_metadata(TextEncodeSettings, context).calls
        positive, negative = [], []
        for call in calls:
            encoder = cast(TextEncoder, pins.get_model(call.model))
            known: dict[str, Tensor] = {}
            positive.append(torch.cat([_encode(encoder, call, text, known) for text in call.texts]))
            if call.negative_texts is not None:
                negative.append(torch.cat([_encode(encoder, call, text, known) for text in call.negative_texts]))
        pins.put_tensor(TensorKey.POSITIVE, positive)
        pins.put_tensor(TensorKey.NEGATIVE, negative)


def _encode(encoder: TextEncoder, call: EncoderCall, text: str, known: dict[str, Tensor]) -> Tensor:
    if text not in known:
        known[text] = _encode_one(encoder, call, text)
    return known[text]


def _encode_one(encoder: TextEncoder, call: EncoderCall, text: str) -> Tensor:
    ids = _token_ids(encoder, call, text)
    device = next(encoder.model.parameters()).device
    outputs = cast(_EncoderOutputs, encoder.model(ids.to(device)))
    chosen: Tensor = getattr(outputs, call.output)
    if not bool(torch.isfinite(chosen).all()):
        raise NonFiniteError(
            f"text encode: {call.model.name} gave NaN or infinity for {text[:40]!r}; check its weights"
        )
    return chosen


def _token_ids(encoder: TextEncoder, call: EncoderCall, text: str) -> Tensor:
    """Ids [1, max_length]: padded, and cut with the end token kept. No mask: padding attends in the reference."""
    full = encoder.tokenizer(text, truncation=False, verbose=False)["input_ids"]
    if len(full) > call.max_length:
        told = f"prompt has {len(full)} tokens for {call.model.name}, which takes {call.max_length}"
        if call.on_overflow == "reject":
            raise InputError(f"{told}: {text[:40]!r}...")
        logger.warning("%s; the rest is not seen by this encoder: %.40r...", told, text)
    padded = encoder.tokenizer(
        text, padding="max_length", max_length=call.max_length, truncation=True, return_tensors="pt"
    )
    ids: Tensor = padded["input_ids"]
    return ids
