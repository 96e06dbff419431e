"""Words and JSON for the results of `kdit verify`."""

from __future__ import annotations

import math
import sys
from itertools import groupby

from kdit.cli.verify.compare import StageReport
from kdit.cli.verify.run import CaseReport, VerifyReport


def print_case(case: CaseReport) -> None:
    """The verdict, then a line per stage: relative error, tolerance. Stages missing for one reason share a line."""
    print(f"{case.family}/{case.case} ({case.pipeline}, {case.seconds:.1f} s): {case.verdict}")
    missing = groupby(case.stages, lambda stage: stage.note if stage.status == "not available" else None)
    for note, stages in missing:
        if note is None:
            for stage in stages:
                print(f"  {stage_line(stage)}")
        else:
            print(f"  {', '.join(stage.name for stage in stages)}: not available: {note}")
    sys.stdout.flush()


def stage_line(stage: StageReport) -> str:
    """As in ``latents                    4.1e-07 <= 1e-04  pass``."""
    parts = [f"{stage.name:26}"]
    if stage.error is not None and stage.tolerance is not None:
        sign = "<=" if stage.error <= stage.tolerance else "> "
        parts.append(f"{stage.error:.1e} {sign} {stage.tolerance:.0e}")
    if stage.largest is not None and stage.largest_tolerance is not None:
        sign = "<=" if stage.largest <= stage.largest_tolerance else "> "
        parts.append(f"largest {stage.largest:.1e} {sign} {stage.largest_tolerance:.0e}")
    note = f"({stage.note})" if stage.note and stage.error is not None else stage.note
    return " ".join([*parts, f" {stage.status}", note]).rstrip()


def print_summary(report: VerifyReport) -> None:
    """The last line."""
    mode = "batch" if report.options.batched else "single"
    only = f" ({report.network_only} of them network only)" if report.network_only else ""
    parts = [f"{report.passes} passed{only}", f"{report.failures} failed"]
    skipped = len(report.cases) - report.passes - report.failures
    if skipped:
        parts.append(f"{skipped} not available")
    print(f"{len(report.cases)} cases ({mode}): {', '.join(parts)}")


def report_json(report: VerifyReport) -> dict[str, object]:
    """Everything, ready for json.dumps. A number that is not finite becomes null."""
    return {
        "folder": str(report.options.folder),
        "mode": "batch" if report.options.batched else "single",
        "threads": report.options.threads,
        "device": report.options.device,
        "passed": report.passed,
        "num_passed": report.passes,
        "num_network_only": report.network_only,
        "num_failed": report.failures,
        "num_not_available": len(report.cases) - report.passes - report.failures,
        "cases": [_case_json(case) for case in report.cases],
    }


def _case_json(case: CaseReport) -> dict[str, object]:
    return {
        "family": case.family,
        "case": case.case,
        "pipeline": case.pipeline,
        "passed": case.passed if case.judged else None,
        "network_only": case.network_only,
        "seconds": round(case.seconds, 3),
        "stages": [_stage_json(stage) for stage in case.stages],
    }


def _stage_json(stage: StageReport) -> dict[str, object]:
    return {
        "name": stage.name,
        "status": stage.status,
        "error": _finite(stage.error),
        "tolerance": stage.tolerance,
        "largest": _finite(stage.largest),
        "largest_tolerance": stage.largest_tolerance,
        "note": stage.note,
    }


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
