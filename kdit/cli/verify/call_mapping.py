"""CallMapping: how a recorded call becomes a kdit request. Each family with a pipeline states its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from torch import Tensor

from kdit.cli.verify.case import CallReader, Case
from kdit.config import RuntimeConfig, SampleConfig
from kdit.errors import InputError
from kdit.keys import FAMILIES, TensorKey
from kdit.pipelines.extra_inputs import ExtraInputs

Pair = tuple[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of Pipeline.request that repeat a recorded call."""

    prompt: str | list[str]
    prompt_negative: str | list[str] | None
    sample_config: SampleConfig
    runtime_config: RuntimeConfig
    extra_inputs: ExtraInputs | None = None
    feeds: Mapping[TensorKey, Tensor | list[Tensor]] | None = None

    @property
    def num_samples(self) -> int:
        """How many pictures it makes."""
        return 1 if isinstance(self.prompt, str) else len(self.prompt)


class CallMapping(ABC):
    """One family's reading of a case."""

    @abstractmethod
    def request(self, case: Case, transformer: Mapping[str, object]) -> Request:
        """The same call for kdit. ``transformer`` is the network's config.json.

        Raises InputError on an argument that kdit cannot express.
        """

    @abstractmethod
    def embeddings(self, case: Case, request: Request) -> Mapping[TensorKey, list[Pair]]:
        """Per prompt pin, the recorded tensors in the order in which ``joined`` gives kdit's own."""

    def joined(self, encoded: list[Tensor], recorded: list[Pair]) -> list[Tensor]:
        """What TEXT_ENCODE put on a prompt pin, in the form in which it was ``recorded`` where the denoiser got it."""
        return encoded

    @abstractmethod
    def initial_latents(self, case: Case) -> Tensor:
        """What the denoiser got at first, in the public form of latents."""

    @abstractmethod
    def first_outputs(self, case: Case, request: Request) -> list[Pair]:
        """What the denoiser returned in the first step, one tensor [B, ...] per guidance branch."""

    @abstractmethod
    def denoiser_calls(self, request: Request, num_steps: int) -> Mapping[str, int]:
        """How often the reference calls each denoiser in ``num_steps`` steps of such a request."""


def has_pipeline(pipeline: str) -> bool:
    """Whether kdit has a pipeline for this class of the reference library."""
    return any(pipeline in entry.pipelines for entry in FAMILIES.values())


def mapping_of(pipeline: str) -> CallMapping:
    """The mapping for a class of the reference library: ``MAPPING`` of ``kdit.cli.verify.families.<family>``."""
    for entry in FAMILIES.values():
        if pipeline in entry.pipelines:
            mapping: CallMapping = import_module(f"kdit.cli.verify.families.{entry.name}").MAPPING
            return mapping
    raise InputError(f"kdit has no pipeline for {pipeline}")


def repeated(texts: str | list[str] | None, copies: int) -> str | list[str] | None:
    """The entries of a list ``copies`` times each, prompt-major as in the reference; one text serves all samples."""
    return [text for text in texts for _ in range(copies)] if isinstance(texts, list) else texts


def seed_and_noise(
    call: CallReader, num_samples: int
) -> tuple[int | tuple[int, ...] | None, dict[TensorKey, Tensor | list[Tensor]] | None]:
    """Where the initial noise comes from: given latents, a seed per sample, or else the recorded draw."""
    latents, seeds = call.tensor("latents"), call.seeds("generator")
    if latents is not None:
        return None, {TensorKey.NOISE: latents}
    if len(seeds) == num_samples:
        return (seeds[0] if num_samples == 1 else seeds), None
    draws = [draw for draw in call.case.draws if draw["by"] != "vae"]
    if len(draws) != 1:
        raise InputError(f"{call.case.where}: expected one recorded draw of noise, got {len(draws)}")
    return None, {TensorKey.NOISE: call.case.tensor(str(draws[0]["key"]))}
