"""Fixtures of all tests: offline libraries, one torch thread, reference families made when first asked for."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

# Read by the libraries when they are imported, and by the processes that tests start.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    OMP_NUM_THREADS="1",  # the tensors are tiny, and the references are made with one thread
)

REFERENCE_SOURCES = Path(__file__).parent / "reference"
NEEDED_FAMILIES = (
    "flux_dev",
    "flux_schnell",
    "sd3_medium",
    "sd35_medium",
    "wan22_ti2v_5b",
    "wan22_ti2v_5b_i2v",
    "wan22_t2v_a14b",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the ``gpu`` tests where there is no CUDA device; torch is asked only if there are any."""
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def mini_dir(repository: Path) -> Path:
    """The checkpoint folder of the built-in model."""
    return repository / "kdit" / "data" / "mini"


@pytest.fixture(scope="session")
def _reference_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where reference families lie: a temporary folder, or one below KDIT_TEST_CACHE that stays."""
    kept = os.environ.get("KDIT_TEST_CACHE")
    if not kept:
        root = tmp_path_factory.mktemp("reference")
        yield root
        shutil.rmtree(root, ignore_errors=True)
        return
    digest = hashlib.sha256()
    for source in sorted(REFERENCE_SOURCES.rglob("*.py")):
        digest.update(source.read_bytes())
    for library in ("torch", "diffusers", "transformers", "tokenizers"):
        digest.update(f"{library} {version(library)}".encode())
    root = Path(kept).resolve() / f"reference-{digest.hexdigest()[:16]}"
    root.mkdir(parents=True, exist_ok=True)
    yield root


@pytest.fixture(scope="session")
def reference_family(_reference_root: Path) -> Callable[[str], Path]:
    """``reference_family("flux_dev")`` is the folder of that family (``model/`` and ``cases/``), made on first use."""

    def family(name: str) -> Path:
        target = _reference_root / name
        if not target.is_dir():
            _make_reference(name, _reference_root)
        return target

    return family


@pytest.fixture(scope="session")
def reference_dir(reference_family: Callable[[str], Path], _reference_root: Path) -> Path:
    """A folder with every family that the tests need, as ``python -m tests.reference --out`` lays it out."""
    for name in NEEDED_FAMILIES:
        reference_family(name)
    return _reference_root


def _make_reference(name: str, root: Path) -> None:
    """Make one family beside its place and move it there whole, so that a broken run leaves nothing behind."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=root, prefix=".making-") as workshop:
        warnings.simplefilter("ignore")  # of diffusers and transformers, about themselves
        import torch

        import tests.reference.families  # noqa: F401  (fills the registry)
        from tests.reference.make import make_family
        from tests.reference.registry import FAMILIES

        with torch.random.fork_rng(devices=[]):
            make_family(FAMILIES[name], Path(workshop), seed=0, check=False)
        try:
            (Path(workshop) / name).rename(root / name)
        except OSError:
            if not (root / name).is_dir():  # otherwise another test run, sharing the folder, was first
                raise
