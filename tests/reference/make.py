"""Writing the folder of one family, and repeating its written cases from their files."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.reference.call import load_call
from tests.reference.case import run_case
from tests.reference.folder import load_pipeline, save_pipeline
from tests.reference.registry import Family
from tests.reference.run import run_latents
from tests.reference.sensitivity import call_sensitivity, distance, parameter_sensitivity, rounding_sensitivity


def folder_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def make_family(spec: Family, out: Path, seed: int, check: bool) -> dict[str, Any]:
    root = out / spec.name
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    started = time.perf_counter()
    save_pipeline(spec, seed, root / "model")
    pipe = load_pipeline(spec, root / "model")
    summary: dict[str, Any] = {
        "family": spec.name,
        "pipeline": spec.pipeline,
        "model_mb": round(folder_bytes(root / "model") / 1e6, 2),
        "cases": {},
    }
    skip: set[str] = set()
    parameters: dict[str, dict[str, Any]] = {}
    for case in spec.cases:
        info, record = run_case(pipe, spec, case, root / "cases" / case.name)
        seen, step0 = info["tensors"], info["step0"] + ".out"
        entry = {
            "seconds": info["seconds"],
            "latents": seen.get("latents"),
            "output": seen.get("output"),
            "step0_out": seen.get(step0) or seen.get(step0 + ".0"),
            "calls": info["calls"],
        }
        if check:
            entry["sensitivity"] = call_sensitivity(pipe, spec, case, skip)
            entry["rounding"] = rounding_sensitivity(pipe, spec, case)
            skip |= {k for k, v in entry["sensitivity"].items() if v > 1e-4 or k == "repeat"}
            fresh = {k: v for k, v in record.first_call.items() if k not in parameters}
            record.first_call = fresh
            parameters.update(parameter_sensitivity(record))
        summary["cases"][case.name] = entry
    summary["cases_mb"] = round(folder_bytes(root / "cases") / 1e6, 2)
    summary["seconds"] = round(time.perf_counter() - started, 1)
    if check:
        summary["parameters"] = parameters
    (root / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def verify_family(spec: Family, out: Path) -> dict[str, float]:
    """Repeat every written case from its files; the distances of the final latents should be 0."""
    pipe = load_pipeline(spec, out / spec.name / "model")
    distances = {}
    for folder in sorted((out / spec.name / "cases").iterdir()):
        latents = run_latents(pipe, spec, load_call(folder))
        stored = load_file(str(folder / "reference.safetensors"))
        distances[folder.name] = distance({k: stored[k] for k in latents}, latents)
    return distances
