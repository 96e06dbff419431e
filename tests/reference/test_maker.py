"""The reference maker itself: what it writes can be read back and repeated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tests.reference.families  # noqa: F401
from tests.reference.make import verify_family
from tests.reference.registry import FAMILIES


def test_all_families_are_registered_in_the_order_of_the_readme(repository: Path) -> None:
    readme = (repository / "tests" / "reference" / "README.md").read_text()
    table = readme.split("## Families")[1].split("##")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| ") and "---" not in row][1:]
    listed = [name.strip() for row in rows for name in row.split(",")]
    assert sorted(listed) == sorted(FAMILIES)


def test_a_family_folder_has_a_checkpoint_and_its_cases(reference_family: Callable[[str], Path]) -> None:
    folder = reference_family("flux_schnell")
    assert (folder / "model" / "model_index.json").is_file()
    assert {case.name for case in (folder / "cases").iterdir()} == {c.name for c in FAMILIES["flux_schnell"].cases}
    for case in (folder / "cases").iterdir():
        info = json.loads((case / "case.json").read_text())
        tensors = load_file(str(case / "reference.safetensors"))
        assert set(info["tensors"]) == set(tensors)
        assert torch.isfinite(tensors["latents"]).all()


def test_noise_follows_from_the_seed(reference_family: Callable[[str], Path]) -> None:
    case = reference_family("flux_schnell") / "cases" / "true_cfg"
    info = json.loads((case / "case.json").read_text())
    generator = torch.Generator().manual_seed(info["call"]["generator"]["$generator"])
    drawn = torch.randn(info["draws"][0]["shape"], generator=generator)
    assert torch.equal(drawn, load_file(str(case / "reference.safetensors"))["noise.0"])


@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_a_written_case_repeats_from_its_files_bit_for_bit(reference_family: Callable[[str], Path]) -> None:
    distances = verify_family(FAMILIES["flux_schnell"], reference_family("flux_schnell").parent)
    assert distances == {case.name: 0.0 for case in FAMILIES["flux_schnell"].cases}
