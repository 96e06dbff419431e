"""Command line of the reference maker; see README.md."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

import tests.reference.families  # noqa: F401  (fills the registry)
from tests.reference.make import make_family, verify_family
from tests.reference.registry import FAMILIES


def _grouped(names: list[str]) -> str:
    """Parameter names with the numbers of one kind collected: ``a.{0,1}.bias``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        name = re.sub(r"^(.*\.?(?:visual|vision_tower|multi_modal_projector))\..*", r"\1.*", name)
        groups.setdefault(re.sub(r"\.\d+\.", ".#.", name, count=1), []).append(
            "".join(re.findall(r"\.(\d+)\.", name)[:1])
        )
    parts = [k.replace("#", "{" + ",".join(dict.fromkeys(v)) + "}") if "#" in k else k for k, v in groups.items()]
    return ", ".join(parts) or "none"


def print_summary(summary: dict[str, Any]) -> None:
    print(
        f"== {summary['family']} ({summary['pipeline']}): model {summary['model_mb']} MB, "
        f"cases {summary['cases_mb']} MB, {summary['seconds']} s",
        flush=True,
    )
    for name, case in summary["cases"].items():
        parts = [
            f"{key} {v['shape']} std {v.get('std')}" for key in ("latents", "step0_out", "output") if (v := case[key])
        ]
        print(f"   {name}: {case['seconds']} s; " + "; ".join(parts))
        if "sensitivity" in case:
            changes = ", ".join(f"{k} {v:.2g}" for k, v in case["sensitivity"].items())
            print(f"      rounding {case['rounding']:.1e}; change: {changes or 'seen in an earlier case'}")
    for component, result in summary.get("parameters", {}).items():
        print(f"   parameters of {component}: {result['parameters']}, without influence: {_grouped(result['dead'])}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.reference",
        description="Build tiny random-weight Diffusion-Transformer checkpoints and their reference outputs.",
    )
    parser.add_argument("--out", type=Path, help="folder to write to")
    parser.add_argument("--family", nargs="+", default=["all"], metavar="NAME", help="families to make, or 'all'")
    parser.add_argument("--list", action="store_true", help="list the families and their cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--check", action="store_true", help="also measure the sensitivities")
    parser.add_argument("--verify", action="store_true", help="repeat the cases already in --out from their files")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (changes the last digits)")
    options = parser.parse_args(argv)
    if options.list:
        for spec in FAMILIES.values():
            print(f"{spec.name:24} {spec.pipeline:28} {', '.join(c.name for c in spec.cases)}")
        return 0
    if options.out is None:
        parser.error("--out is required")
    names = list(FAMILIES) if options.family == ["all"] else options.family
    unknown = [n for n in names if n not in FAMILIES]
    if unknown:
        parser.error(f"unknown families: {', '.join(unknown)}")
    torch.set_num_threads(options.threads)
    failures = []
    for name in names:
        try:
            if options.verify:
                distances = verify_family(FAMILIES[name], options.out)
                print(f"{name}: " + ", ".join(f"{k} {v:.1e}" for k, v in distances.items()), flush=True)
                continue
            print_summary(make_family(FAMILIES[name], options.out, 1000 * options.seed, options.check))
        except Exception as error:  # one family must not stop the others
            failures.append(name)
            print(f"== {name}: FAILED: {type(error).__name__}: {error}", flush=True)
            if os.environ.get("MAKE_REFERENCE_TRACE"):
                raise
    if failures:
        print(f"failed: {', '.join(failures)}", file=sys.stderr)
    return 1 if failures else 0
