"""load_tensors: what is mapped and what is copied, the values of both, and the memory that loading takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kdit.errors import CheckpointError
from kdit.models.weights.header import TensorInfo, read_header
from kdit.models.weights.load_tensors import MAPPED_FROM, PIECE, Wanted, load_tensors
from kdit.models.weights.plan import Placement
from kdit.models.weights.recipe import derived

CPU = torch.device("cpu")
ROWS, COLUMNS = 700, 1024  # 2.8 MB in float32, 1.4 MB in a half precision: larger than MAPPED_FROM


def write(folder: Path, **tensors: Tensor) -> dict[str, TensorInfo]:
    save_file(tensors, folder / "x.safetensors")
    return read_header(folder / "x.safetensors")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def load_one(
    info: TensorInfo, dtype: torch.dtype, shape: tuple[int, ...] | None = None, device: torch.device = CPU
) -> Tensor:
    wanted = {"w": Wanted(info.shape if shape is None else shape, dtype)}
    return load_tensors(wanted, [Placement(info, "w", 0, 0)], device)["w"]


def is_mapped(tensor: Tensor) -> bool:
    """Whether the tensor lies in the mapping of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return name.endswith(".safetensors")
    return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_only_large_tensors_of_the_wanted_dtype_are_mapped(tmp_path: Path) -> None:
    large, small = random(ROWS, COLUMNS), random(10, 10)
    infos = write(tmp_path, large=large, small=small)
    assert large.nbytes >= MAPPED_FROM > small.nbytes
    same = load_one(infos["large"], torch.float32)
    assert is_mapped(same) and torch.equal(same, large)
    for copied, expected in (
        (load_one(infos["small"], torch.float32), small),
        (load_one(infos["large"], torch.bfloat16), large.bfloat16()),
    ):
        assert not is_mapped(copied) and torch.equal(copied, expected)


def test_writing_to_a_mapped_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    infos = write(tmp_path, w=random(ROWS, COLUMNS))
    before = (tmp_path / "x.safetensors").read_bytes()
    load_one(infos["w"], torch.float32).zero_()
    assert (tmp_path / "x.safetensors").read_bytes() == before
    assert load_one(infos["w"], torch.float32).count_nonzero()


def test_a_mapped_tensor_outlives_the_file_name(tmp_path: Path) -> None:
    large = random(ROWS, COLUMNS)
    infos = write(tmp_path, w=large)
    loaded = load_one(infos["w"], torch.float32)
    (tmp_path / "x.safetensors").unlink()
    assert torch.equal(loaded, large)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_values_in_every_dtype(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    given = random(1800, 1000).to(stored)  # several pieces
    assert given.nbytes > PIECE or stored.itemsize < 4
    assert torch.equal(load_one(write(tmp_path, w=given)["w"], wanted), given.to(wanted))


def test_sources_join_along_either_dimension(tmp_path: Path) -> None:
    a, b, c = random(900, COLUMNS), random(500, COLUMNS) + 1, random(900, 300) + 2
    infos = write(tmp_path, a=a, b=b, c=c)
    rows = [Placement(infos["a"], "w", 0, 0), Placement(infos["b"], "w", 0, 900)]
    columns = [Placement(infos["a"], "v", 1, 0), Placement(infos["c"], "v", 1, COLUMNS)]
    for dtype in (torch.float32, torch.bfloat16):
        wanted = {"w": Wanted((1400, COLUMNS), dtype), "v": Wanted((900, COLUMNS + 300), dtype)}
        got = load_tensors(wanted, [*columns, *rows], CPU)
        assert torch.equal(got["w"], torch.cat([a, b]).to(dtype))
        assert torch.equal(got["v"], torch.cat([a, c], dim=1).to(dtype))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,), (5,), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_odd_shapes(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = random(*shape)
    assert torch.equal(load_one(write(tmp_path, w=given)["w"], dtype), given.to(dtype))


def test_views_that_were_saved_are_stored_whole(tmp_path: Path) -> None:
    base = random(COLUMNS, ROWS)
    given = base.t()[1:, ::2].contiguous()
    assert torch.equal(load_one(write(tmp_path, w=given)["w"], torch.float32), base.t()[1:, ::2])


def test_rows_of_a_stored_tensor(tmp_path: Path) -> None:
    given = random(3 * ROWS, COLUMNS)
    stored = write(tmp_path, w=given)["w"]
    middle = derived("m", stored, ((ROWS, 2 * ROWS),))
    swapped = derived("s", stored, ((ROWS, 2 * ROWS), (0, ROWS)))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(load_one(middle, dtype), given[ROWS : 2 * ROWS].to(dtype))
        expected = torch.cat([given[ROWS : 2 * ROWS], given[:ROWS]]).to(dtype)
        assert torch.equal(load_one(swapped, dtype), expected)
    assert torch.equal(
        load_one(derived("f", stored, None, (3 * ROWS, 2, COLUMNS // 2)), torch.float32),
        given.view(3 * ROWS, 2, COLUMNS // 2),
    )


def test_elements_at_odd_addresses(tmp_path: Path) -> None:
    given = random(ROWS, COLUMNS)
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
              "w": {"dtype": "F32", "shape": [ROWS, COLUMNS], "data_offsets": [1, 1 + given.nbytes]}}  # fmt: skip
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" + given.numpy().tobytes())
    info = read_header(path)["w"]
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(load_one(info, dtype), given.to(dtype))
    assert load_one(info, torch.float32, device=torch.device("meta")).is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_that_shrank_after_it_was_checked(tmp_path: Path, dtype: torch.dtype) -> None:
    info = write(tmp_path, w=random(ROWS, COLUMNS))["w"]
    path = tmp_path / "x.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"x\.safetensors became shorter while it was read"):
        load_one(info, dtype)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"x\.safetensors cannot be read: No such file"):
        load_one(info, dtype)


MEASURE = """
import sys, torch
from pathlib import Path
from kdit.models.weights.header import read_header
from kdit.models.weights.load_tensors import Wanted, load_tensors
from kdit.models.weights.plan import Placement

def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

infos = read_header(Path(sys.argv[1]))
for dtype in (torch.float32, torch.bfloat16, torch.float64):
    before = status("VmRSS")
    wanted = {name: Wanted(info.shape, dtype) for name, info in infos.items()}
    tensors = load_tensors(wanted, [Placement(info, name, 0, 0) for name, info in infos.items()], torch.device("cpu"))
    print(status("VmHWM") - before)
    del tensors
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's memory counters")
def test_peak_memory_is_near_the_size_of_the_result(tmp_path: Path) -> None:
    mebibytes = 96
    infos = write(tmp_path, **{f"w{i}": random(2048, 1024) for i in range(mebibytes // 8)})
    assert sum(info.num_bytes for info in infos.values()) == mebibytes << 20
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "x.safetensors")], capture_output=True, text=True, check=True
    )
    peaks = [int(line) >> 20 for line in done.stdout.split()]
    allowance = 20
    assert peaks[0] < allowance  # mapped, and not touched yet
    assert mebibytes // 2 <= peaks[1] < mebibytes // 2 + allowance
    assert 2 * mebibytes <= peaks[2] < 2 * mebibytes + allowance


def test_systems_without_preadv_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = torch.randn(70, 5, generator=torch.Generator().manual_seed(0))
    infos = write(tmp_path, a=stored)
    placements = [Placement(infos["a"], "a", 0, 0)]
    monkeypatch.setattr("kdit.models.weights.load_tensors._HAS_PREADV", False)
    found = load_tensors({"a": Wanted((70, 5), torch.float32)}, placements, torch.device("cpu"))
    assert torch.equal(found["a"], stored)
