"""The fingerprint notices every change that training makes, and costs the same for any size."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from kdit.errors import CheckpointError
from kdit.models import weight_hash as module
from kdit.models.checkpoint import Checkpoint
from kdit.models.weight_hash import MEBIBYTE, NUM_BLOCKS, block_starts, weight_hash
from tests.models.checkpoint_files import NETWORK_FILE, clone, overwrite, with_header


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_header(b"{}", bytes(range(256)) * 40))
    return path


def test_every_byte_of_a_small_file_counts(file: Path) -> None:
    before = weight_hash([("x", file)])
    assert weight_hash([("x", file)]) == before and len(before) == 64
    for position in (0, 9, 5000, file.stat().st_size - 1):
        flip(file, position)
        assert weight_hash([("x", file)]) != before
        flip(file, position)
    assert weight_hash([("x", file)]) == before


def test_names_sizes_and_borders_count(file: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"12")
    b.write_bytes(b"3")
    before = weight_hash([("a", a), ("b", b)])
    assert weight_hash([("b", b), ("a", a)]) == before  # the order of the files does not
    assert weight_hash([("a", a), ("c", b)]) != before
    assert weight_hash([("a", a)]) != before
    a.write_bytes(b"1")
    b.write_bytes(b"23")
    assert weight_hash([("a", a), ("b", b)]) != before


def test_a_large_file_is_sampled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEBIBYTE", 16)
    monkeypatch.setattr(module, "WHOLE_FILE_LIMIT", 4096)
    path = tmp_path / "large"
    header = b'{"a": 1}'
    path.write_bytes(with_header(header, bytes(8000)))
    size, data_start = path.stat().st_size, 8 + len(header)
    starts = block_starts(data_start, size)
    before = weight_hash([("x", path)])

    def changes(position: int) -> bool:
        flip(path, position)
        changed = weight_hash([("x", path)]) != before
        flip(path, position)
        return changed

    assert all(changes(position) for position in (0, 9, data_start - 1))  # header
    assert all(changes(start) and changes(start + 15) for start in starts)
    assert not changes(starts[0] + 16)  # between two blocks
    with path.open("ab") as file:
        file.write(b"\0")
    assert weight_hash([("x", path)]) != before


@pytest.mark.parametrize("size", [64 * MEBIBYTE + 1, 200 * MEBIBYTE, 10**11])
def test_blocks_reach_from_the_first_byte_to_the_last(size: int) -> None:
    starts = block_starts(1000, size)
    assert len(starts) == NUM_BLOCKS
    assert starts[0] == 1000 and starts[-1] + MEBIBYTE == size
    gaps = {b - a for a, b in pairwise(starts)}
    assert max(gaps) - min(gaps) <= 1


def test_hash_of_a_checkpoint(mini_dir: Path, tmp_path: Path) -> None:
    folder = clone(mini_dir, tmp_path / "renamed")
    checkpoint, original = Checkpoint.open(folder), Checkpoint.open(mini_dir)
    assert checkpoint.weight_hash() == original.weight_hash()
    data = bytearray((folder / "vae" / NETWORK_FILE).read_bytes())
    data[-1] ^= 1
    overwrite(folder / "vae" / NETWORK_FILE, bytes(data))
    assert checkpoint.weight_hash() != original.weight_hash()


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing cannot be read"):
        weight_hash([("x", tmp_path / "nothing")])
