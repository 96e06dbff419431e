"""Network: the interface of every diffusion transformer. It holds weights and no runtime state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor, nn

from kdit.models.rows import Cond, LatentShape, ModTable, Rows, Static, Streams
from kdit.models.weight_rule import WeightRule
from kdit.ops.opset import OpSet

if TYPE_CHECKING:
    from kdit.models.weights.stream import WeightStream

Block = Callable[[Streams, Tensor, Rows], Streams]
"""block(x, mod [R, n, D], rows) -> x; the unit of compilation, offload and step caches."""


class Network(nn.Module):
    """A diffusion transformer, split where the loop splits it.

    ``prepare_static`` and ``prepare_mod`` run once per request, ``embed``, the blocks and ``head`` at every
    step. ``run_stack`` is the only caller of the blocks.
    """

    rules: ClassVar[tuple[WeightRule, ...]]
    ignored: ClassVar[tuple[str, ...]] = ()
    """Tensors that a checkpoint may hold and that the reference does not read either; ``{}``: a block's index."""
    float32: ClassVar[tuple[str, ...]] = ()
    """Parameters, or modules with all theirs, that are loaded in float32 whatever the dtype; ``{}`` as above."""
    streamed: ClassVar[tuple[str, ...]] = ()
    """Modules that ``prepare_mod`` alone uses, each with parameters of its own or made of such: they may be loaded for
    it and dropped after it."""
    stream: WeightStream | None = None  # loads them, where they are not kept in memory
    blocks: nn.ModuleList | tuple[nn.Module, ...]
    ops: OpSet

    @classmethod
    def from_config(cls, config: Mapping[str, object], *, ops: OpSet) -> Self:
        """Build from the checkpoint's config.json. Raises CheckpointError on a value that is not supported."""
        raise NotImplementedError

    def prepare_static(self, cond: Cond, shape: LatentShape) -> Static:
        """All that no step changes: text projections, rotary tables, cross-attention keys and values."""
        raise NotImplementedError

    def prepare_mod(self, timesteps: Tensor, cond: Cond) -> ModTable:
        """Modulation vectors. The only user of the modulation weights.

        ``timesteps``: [steps], or [steps, k] where tokens of one row stand at k different times; on the
        scale and in the dtype that the family's reference gives its transformer.
        """
        raise NotImplementedError

    def embed(self, rows: Rows) -> Streams:
        """Latents and static text to hidden tokens."""
        raise NotImplementedError

    def head(self, x: Streams, rows: Rows) -> Tensor:
        """Hidden image tokens to the prediction, in the layout of ``rows.latents``."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that latents and conditioning must have."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device
