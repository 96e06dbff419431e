"""TEXT_ENCODE: runs the text encoders that its context lists and puts their outputs in that order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, cast

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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EncoderOutput = Literal["last_hidden_state", "penultimate_hidden_state", "pooler_output", "text_embeds"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderCall:
    """One encoder applied to one text per sample."""

    model: ModelKey
    texts: tuple[str, ...]
    negative_texts: tuple[str, ...] | None  # None: no guidance branch
    max_length: int | None  # tokens, padding included; None: as many as the encoder takes
    outputs: tuple[EncoderOutput, ...]  # each becomes a tensor of its own
    masked: bool = False  # the encoder gets the attention mask, and states of padding become zero
    on_overflow: Literal["cut", "reject"] = "cut"


class _EncoderOutputs(Protocol):
    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...]
    pooler_output: Tensor
    text_embeds: Tensor


@dataclass(frozen=True)
class TextEncodeSettings:
    """The node's metadata."""

    calls: tuple[EncoderCall, ...]


@InferNodeFactory.register(InferNodeType.TEXT_ENCODE, ModelKey.of_kind(ModelKind.TEXT_ENCODER))
class TextEncodeNode(InferNode):
    """Writes one tensor per call and output to POSITIVE and to NEGATIVE
    (an empty list if no call has negative texts).
    """

    input_defs: ClassVar[list[PinDef]] = []
    output_defs: ClassVar[list[PinDef]] = [TensorKey.POSITIVE, TensorKey.NEGATIVE]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Encode every distinct text once, by itself, so that it does not depend on its neighbours."""
        calls = read_metadata(TextEncodeSettings, context).calls
        positive, negative = list[Tensor](), list[Tensor]()
        for call in calls:
            encode = _Encoding(cast(TextEncoder, pins.get_model(call.model)), call, pins.notice)
            positive += encode.batch(call.texts)
            if call.negative_texts is not None:
                negative += encode.batch(call.negative_texts)
        pins.put_tensor(TensorKey.POSITIVE, positive)
        pins.put_tensor(TensorKey.NEGATIVE, negative)


class _Encoding:
    """One encoder call; remembers what it has encoded."""

    def __init__(self, encoder: TextEncoder, call: EncoderCall, notice: Callable[[str], None]) -> None:
        self.encoder, self.call, self.notice = encoder, call, notice
        positions = getattr(encoder.model.config, "max_position_embeddings", None)
        self.max_length = max_length(call, encoder.tokenizer, positions)
        self.known: dict[str, tuple[Tensor, ...]] = {}

    def batch(self, texts: tuple[str, ...]) -> list[Tensor]:
        """Each chosen output for all texts, [B, ...]."""
        encoded = [self._once(text) for text in texts]
        return [torch.cat(parts) for parts in zip(*encoded, strict=True)]

    def _once(self, text: str) -> tuple[Tensor, ...]:
        if text not in self.known:
            self.known[text] = self._encode(text)
        return self.known[text]

    def _encode(self, text: str) -> tuple[Tensor, ...]:
        """The chosen outputs for one text, each [1, ...]."""
        device = next(self.encoder.model.parameters()).device
        ids, mask = (tensor.to(device) for tensor in self._tokens(text))
        options: dict[str, object] = {"attention_mask": mask} if self.call.masked else {}
        if "penultimate_hidden_state" in self.call.outputs:
            options["output_hidden_states"] = True
        encoded = cast(_EncoderOutputs, self.encoder.model(ids, **options))
        chosen = tuple(self._pick(encoded, output, mask) for output in self.call.outputs)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in chosen):
            raise NonFiniteError(
                f"text encode: {self.call.model.name} gave NaN or infinity for {text[:40]!r}; check its weights"
            )
        return chosen

    def _pick(self, encoded: _EncoderOutputs, output: EncoderOutput, mask: Tensor) -> Tensor:
        if output == "penultimate_hidden_state":
            found = encoded.hidden_states[-2]
        else:
            found = cast(Tensor, getattr(encoded, output))
        if self.call.masked and found.ndim == 3:
            found = found * mask[..., None].to(found.dtype)
        return found

    def _tokens(self, text: str) -> tuple[Tensor, Tensor]:
        """Ids and attention mask [1, max_length]: padded, and cut with the end token kept."""
        tokenizer, length = self.encoder.tokenizer, self.max_length
        if told := check_length(tokenizer, self.call, text, length):
            self.notice(f"{told}; the rest is not seen by this encoder: {text[:40]!r}...")
        tokens = tokenizer(text, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return tokens["input_ids"], tokens["attention_mask"]


def max_length(call: EncoderCall, tokenizer: PreTrainedTokenizerBase, positions: object) -> int:
    """The call's own, else what the tokenizer states, never more than the model has ``positions`` for."""
    if call.max_length is not None:
        return call.max_length
    stated = int(tokenizer.model_max_length)
    return min(stated, positions) if isinstance(positions, int) else stated


def check_length(tokenizer: PreTrainedTokenizerBase, call: EncoderCall, text: str, length: int) -> str | None:
    """That ``text`` has more than ``length`` tokens, if it has. Raises InputError where the call refuses such."""
    num_tokens = len(tokenizer(text, truncation=False, verbose=False)["input_ids"])
    if num_tokens <= length:
        return None
    told = f"prompt has {num_tokens} tokens for {call.model.name}, which takes {length}"
    if call.on_overflow == "reject":
        raise InputError(f"{told}: {text[:40]!r}...")
    return told
