"""Runs reference cases through kdit and compares each stage. Called by `kdit verify` and by the parity tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kdit.cli.verify.call_mapping import has_pipeline
from kdit.cli.verify.case import Case, FamilyFolder, find_families, read_case
from kdit.cli.verify.compare import StageReport, errors_fail, not_available
from kdit.cli.verify.network_stage import NAME as NETWORK
from kdit.cli.verify.network_stage import NetworkStage
from kdit.cli.verify.pipeline_stages import PIPELINE_STAGES, PipelineStages
from kdit.engine.engine import Engine
from kdit.errors import InputError

READING = "case"  # reported only if the case's files cannot be read


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Which cases, and how they run."""

    folder: Path
    batched: bool = False  # every case together with two other requests that stand at other steps
    families: tuple[str, ...] = ()  # empty: all
    cases: tuple[str, ...] = ()
    threads: int = 1
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class CaseReport:
    """All stages of one case."""

    family: str
    case: str
    pipeline: str
    stages: tuple[StageReport, ...]
    seconds: float

    @property
    def judged(self) -> bool:
        """Whether any stage could be compared."""
        return any(stage.status != "not available" for stage in self.stages)

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing failed."""
        return self.judged and all(stage.status != "fail" for stage in self.stages)

    @property
    def network_only(self) -> bool:
        """Whether it passed and nothing but single forwards of the network was compared."""
        return self.passed and all(stage.name == NETWORK for stage in self.stages if stage.status != "not available")

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.judged:
            return "not available"
        if not self.passed:
            return "failed"
        return "passed (network only)" if self.network_only else "passed"


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """All cases of one `kdit verify`."""

    options: VerifyOptions
    cases: list[CaseReport] = field(default_factory=list)

    @property
    def failures(self) -> int:
        """Number of cases with a failed stage."""
        return sum(case.judged and not case.passed for case in self.cases)

    @property
    def passes(self) -> int:
        """Number of cases that were compared and passed."""
        return sum(case.passed for case in self.cases)

    @property
    def network_only(self) -> int:
        """Number of passed cases in which only the network was compared."""
        return sum(case.network_only for case in self.cases)

    @property
    def passed(self) -> bool:
        """Whether at least one case was compared and none failed."""
        return self.passes > 0 and self.failures == 0


def run_verify(options: VerifyOptions, on_case: Callable[[CaseReport], None] | None = None) -> VerifyReport:
    """Run every case that the options select; ``on_case`` gets each report as soon as it is there.

    Raises CheckpointMissingError if the folder does not exist, InputError if it holds no case, and ConfigError
    for an unknown device. Everything else that is wrong with a model or a case fails that case and leaves the
    others alone.
    """
    Engine.single(options.device)  # refuses a device once, not in every case
    report = VerifyReport(options=options)
    with _threads(options.threads):
        for family in find_families(options.folder, options.families, options.cases):
            network = NetworkStage(family.model, options.device)
            pipeline = PipelineStages(family.model, batched=options.batched, device=options.device)
            for folder in family.cases:
                case_report = _run_case(family, folder, network, pipeline)
                report.cases.append(case_report)
                if on_case is not None:
                    on_case(case_report)
    if not report.cases:
        chosen = [*(f"family {name}" for name in options.families), *(f"case {name}" for name in options.cases)]
        raise InputError(
            f"{options.folder}: no case to verify; expected FAMILY/model and FAMILY/cases/CASE/case.json"
            + (f" for {', '.join(chosen)}" if chosen else "")
        )
    return report


def _run_case(family: FamilyFolder, folder: Path, network: NetworkStage, pipeline: PipelineStages) -> CaseReport:
    started = time.perf_counter()
    pipeline_class, stages = "unknown", list[StageReport]()
    with errors_fail(stages, (READING,)):
        case = read_case(folder)
        pipeline_class = case.pipeline
        with errors_fail(stages, (NETWORK,)):
            stages.append(network.run(case))
        stages += _run_pipeline(case, pipeline)
    return CaseReport(
        family=family.name,
        case=folder.name,
        pipeline=pipeline_class,
        stages=tuple(stages),
        seconds=time.perf_counter() - started,
    )


def _run_pipeline(case: Case, pipeline: PipelineStages) -> list[StageReport]:
    if has_pipeline(case.pipeline):
        return pipeline.run(case)
    return [not_available(name, f"kdit has no pipeline for {case.pipeline} yet") for name in PIPELINE_STAGES]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
