"""Every damaged folder is refused before a model is built, with what was found and what was expected."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kdit.errors import CheckpointError, CheckpointMissingError
from kdit.models.checkpoint import Checkpoint
from kdit.models.text_encoder import load_text_encoder
from kdit.models.vae import load_vae
from kdit.models.weights import component_folder
from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.header import read_header
from kdit.models.weights.loading import load_network
from kdit.ops.opset import OpSet
from tests.models.checkpoint_files import (
    NETWORK_FILE,
    NETWORK_INDEX,
    clone,
    edit_header,
    edit_json,
    edit_tensors,
    overwrite,
    shard,
    with_header,
    write_index,
)

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9891539248\n"
WEIGHTS = (  # component, its weight file
    ("transformer", NETWORK_FILE),
    ("vae", NETWORK_FILE),
    ("text_encoder", "model.safetensors"),
    ("text_encoder_2", "model.safetensors"),
)


@pytest.fixture
def folder(reference_family: Callable[[str], Path], tmp_path: Path) -> Path:
    return clone(reference_family("flux_dev") / "model", tmp_path / "model")


def load(folder: Path, component: str) -> object:
    """Load one component alone, as its node does."""
    path = folder / component
    if component == "transformer":
        return load_network(ComponentFolder.at(path), dtype=torch.float32, device="cpu", ops=OpSet())
    if component == "vae":
        return load_vae(path, dtype=torch.float32, device="cpu")
    tokenizer = folder / component.replace("text_encoder", "tokenizer")
    return load_text_encoder(path, tokenizer, dtype=torch.float32, device="cpu")


def refused(folder: Path, component: str, error: type[CheckpointError] = CheckpointError) -> str:
    """The one message that checking the folder, and loading the component alone, end with."""
    with pytest.raises(CheckpointError) as of_check:
        Checkpoint.open(folder).check()
    with pytest.raises(CheckpointError) as of_load:
        load(folder, component)
    assert type(of_check.value) is type(of_load.value) is error
    assert str(of_check.value) == str(of_load.value)
    return str(of_check.value)


def in_order(header: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries in the order of their data."""
    entries = [value for key, value in header.items() if key != "__metadata__"]
    return sorted(entries, key=lambda entry: entry["data_offsets"])


def test_the_undamaged_folder_is_accepted(folder: Path) -> None:
    assert Checkpoint.open(folder).faults() == ()
    Checkpoint.open(folder).check()


@pytest.mark.parametrize(("component", "name"), WEIGHTS)
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty (0 bytes)"),
        (b"{}", "is no safetensors file"),
        (LFS_POINTER, "is a Git LFS pointer"),
        (with_header(b"{}")[:9], "truncated: its header alone needs 10 bytes, the file has 9"),
        (struct.pack("<Q", 5000) + b"{" + b" " * 90, "truncated: its header alone needs 5008 bytes, the file has 99"),
        (struct.pack("<Q", 1 << 62) + b"{" + b" " * 90, "is no safetensors file"),
        (with_header(b'{"a": '), "the safetensors header is damaged"),
        (with_header(b'{"a": 1}'), "expected dtype, shape and data_offsets"),
        (b"<!DOCTYPE html><html><body>Access denied</body></html>", "is a web page"),
        (b"GGUF" + bytes(60), "is a GGUF file"),
    ],
    ids=["empty", "short", "lfs", "cut", "long-header", "huge-header", "bad-json", "bad-entry", "html", "gguf"],
)
def test_what_is_no_safetensors_file(folder: Path, component: str, name: str, content: bytes, expected: str) -> None:
    path = folder / component / name
    overwrite(path, content)
    message = refused(folder, component)
    assert str(path) in message and expected in message


@pytest.mark.parametrize(("component", "name"), WEIGHTS)
@pytest.mark.parametrize("change", [-1, +1, "half"])
def test_wrong_size_is_named_with_the_size_needed(folder: Path, component: str, name: str, change: int | str) -> None:
    path = folder / component / name
    data = path.read_bytes()
    damaged = data[: len(data) // 2] if change == "half" else data[:-1] if change == -1 else data + b"\0"
    overwrite(path, damaged)
    message = refused(folder, component)
    assert str(path) in message and f"{len(damaged)} bytes" in message and str(len(data)) in message


def move(entry: dict[str, Any], by: int) -> None:
    entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


HEADER_DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "overlap": (lambda header: move(in_order(header)[-1], -4), "overlaps the tensor before it"),
    "gap": (lambda header: move(in_order(header)[0], 4), "leaves a gap before it"),
    "negative": (lambda header: move(in_order(header)[0], -4), "is damaged"),
    "reversed": (lambda header: in_order(header)[0]["data_offsets"].reverse(), "is damaged"),
    "shape": (lambda header: in_order(header)[0].update(shape=["3"]), "is damaged"),
    "span": (lambda header: in_order(header)[0]["shape"].append(2), "needs"),
    "dtype": (lambda header: in_order(header)[0].update(dtype="Q3"), "has the dtype 'Q3'"),
    "metadata": (lambda header: header.update(__metadata__={"format": 1}), "is not a table of strings"),
}


@pytest.mark.parametrize("damage", HEADER_DAMAGE)
@pytest.mark.parametrize(("component", "name"), [WEIGHTS[0], WEIGHTS[3]])
def test_header_that_contradicts_itself(folder: Path, component: str, name: str, damage: str) -> None:
    change, expected = HEADER_DAMAGE[damage]
    edit_header(folder / component / name, change)
    message = refused(folder, component)
    assert str(folder / component / name) in message and expected in message


def test_name_that_stands_twice(tmp_path: Path) -> None:
    entry = b'{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    overwrite(tmp_path / "x.safetensors", with_header(b'{"a": ' + entry + b', "a": ' + entry + b"}", bytes(1)))
    with pytest.raises(CheckpointError, match="'a' stands in it twice"):
        read_header(tmp_path / "x.safetensors")


class Canary:
    """Makes a file as soon as somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def pickles(canary: Path) -> dict[str, Callable[[Path], None]]:
    def plain(protocol: int) -> Callable[[Path], None]:
        return lambda path: overwrite(path, pickle.dumps(Canary(canary), protocol=protocol))

    def torch_save(zipped: bool) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            path.unlink(missing_ok=True)
            torch.save({"x": Canary(canary)}, path, _use_new_zipfile_serialization=zipped)

        return write

    return {"p0": plain(0), "p2": plain(2), "p5": plain(5), "zip": torch_save(True), "legacy": torch_save(False)}


@pytest.mark.parametrize(("component", "name"), WEIGHTS)
@pytest.mark.parametrize("kind", ["p0", "p2", "p5", "zip", "legacy"])
def test_a_pickle_is_never_run_whatever_its_name(
    folder: Path, tmp_path: Path, component: str, name: str, kind: str
) -> None:
    canary = tmp_path / "canary"
    pickles(canary)[kind](folder / component / name)
    message = refused(folder, component)
    assert str(folder / component / name) in message
    assert ("can run code" in message) == (kind != "p0")  # protocol 0 has no mark of its own
    assert not canary.exists()
    with (folder / component / name).open("rb") as file:  # the canary does sing
        torch.load(file, weights_only=False) if kind in ("zip", "legacy") else pickle.load(file)
    assert canary.exists()


@pytest.mark.parametrize(("component", "name"), WEIGHTS)
@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_pickles_alone_are_refused(folder: Path, tmp_path: Path, component: str, name: str, suffix: str) -> None:
    canary = tmp_path / "canary"
    (folder / component / name).unlink()
    other = Path(name).stem + suffix
    pickles(canary)["zip"](folder / component / other)
    message = refused(folder, component)
    assert f"only as a pickle ({other})" in message and "convert" in message
    assert not canary.exists()


def test_a_pickle_beside_good_weights_is_left_alone(folder: Path, tmp_path: Path) -> None:
    for component, name in WEIGHTS:
        pickles(tmp_path / "canary")["zip"](folder / component / f"{Path(name).stem}.bin")
    Checkpoint.open(folder).check()
    for component, _ in WEIGHTS:
        load(folder, component)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("component", "stem"), [("transformer", "diffusion_pytorch_model"), ("text_encoder_2", "model")]
)
def test_missing_shards_are_listed(folder: Path, component: str, stem: str) -> None:
    first, _, third = shard(folder / component, stem)
    Checkpoint.open(folder).check()
    (folder / component / first).unlink()
    (folder / component / third).unlink()
    message = refused(folder, component, CheckpointMissingError)
    assert f"2 of 3 shards in {stem}.safetensors.index.json are missing: {first}, {third}" in message
    assert "incomplete download?" in message


def test_damaged_shard(folder: Path) -> None:
    name = shard(folder / "transformer")[1]
    overwrite(folder / "transformer" / name, LFS_POINTER)
    message = refused(folder, "transformer")
    assert name in message and "Git LFS pointer" in message


@pytest.mark.parametrize(
    ("component", "stem"), [("transformer", "diffusion_pytorch_model"), ("text_encoder_2", "model")]
)
def test_shard_that_the_index_does_not_know(
    folder: Path, component: str, stem: str, caplog: pytest.LogCaptureFixture
) -> None:
    shard(folder / component, stem)
    extra = folder / component / f"{stem}-00004-of-00003.safetensors"
    overwrite(extra, with_header(b"{}"))
    message = refused(folder, component)
    assert f"does not list {extra.name}" in message and "stale index?" in message
    left_over = extra.rename(extra.with_name(f"{stem}-00002-of-00002.safetensors"))  # of another series
    load(folder, component)
    assert f"{left_over.name} is not read" in caplog.text
    Checkpoint.open(folder).check()


def test_index_that_names_another_shard_or_tensor(folder: Path) -> None:
    first, second, _ = shard(folder / "transformer")
    index = folder / "transformer" / NETWORK_INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    moved = next(name for name, where in weight_map.items() if where == first)
    write_index(index, {**weight_map, moved: second})
    assert f"disagree on 1 tensors: {moved}" in refused(folder, "transformer")
    write_index(index, {**weight_map, "ghost.weight": first})
    assert "disagree on 1 tensors: ghost.weight" in refused(folder, "transformer")
    write_index(index, {name: where for name, where in weight_map.items() if name != moved})
    assert f"disagree on 1 tensors: {moved}" in refused(folder, "transformer")


@pytest.mark.parametrize("name", ["../vae/diffusion_pytorch_model.safetensors", 7])
def test_index_must_stay_in_its_folder(folder: Path, name: str | int) -> None:
    shard(folder / "transformer")
    write_index(folder / "transformer" / NETWORK_INDEX, {"proj_out.weight": name})  # type: ignore[dict-item]
    assert "expected a file of the same folder" in refused(folder, "transformer")


def test_single_file_and_shards_together(folder: Path, tmp_path: Path) -> None:
    single = (folder / "transformer" / NETWORK_FILE).read_bytes()
    shard(folder / "transformer")
    overwrite(folder / "transformer" / NETWORK_FILE, single)
    assert "which one counts?" in refused(folder, "transformer")


def test_shards_without_an_index(folder: Path) -> None:
    shard(folder / "vae")
    (folder / "vae" / NETWORK_INDEX).unlink()
    assert NETWORK_INDEX in refused(folder, "vae", CheckpointMissingError)


def test_other_file_names_are_told(folder: Path) -> None:
    (folder / "vae" / NETWORK_FILE).rename(folder / "vae" / "vae.safetensors")
    message = refused(folder, "vae", CheckpointMissingError)
    assert "found vae.safetensors; rename" in message and NETWORK_FILE in message


@pytest.mark.parametrize(("component", "name"), WEIGHTS)
def test_no_weights_at_all(folder: Path, component: str, name: str) -> None:
    (folder / component / name).unlink()
    message = refused(folder, component, CheckpointMissingError)
    assert f"{folder / component}: no weights, expected {name}" in message and "found config.json" in message


@pytest.mark.parametrize(("component", "name"), WEIGHTS)
def test_other_numbers_of_8_bits_are_refused(folder: Path, component: str, name: str) -> None:
    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        key = next(key for key in tensors if key.endswith("weight"))
        tensors[key] = tensors[key].abs().to(torch.float8_e8m0fnu)

    edit_tensors(folder / component / name, narrow)
    message = refused(folder, component)
    assert "1 tensors in F8_E8M0, which is not supported, expected F64, F32, F16, BF16, F8_E4M3, F8_E5M2" in message


def test_quantised_component_is_refused(folder: Path) -> None:
    edit_json(folder / "text_encoder_2" / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    assert "quantised weights are not supported" in refused(folder, "text_encoder_2")


@pytest.mark.parametrize(("component", "name"), WEIGHTS)
def test_absent_folder_and_config(folder: Path, component: str, name: str) -> None:
    (folder / component / "config.json").unlink()
    assert f"{folder / component / 'config.json'} is missing" in refused(folder, component, CheckpointMissingError)
    shutil.rmtree(folder / component)
    with pytest.raises(CheckpointMissingError, match=rf"component {component} .*there is no folder .*{component}"):
        Checkpoint.open(folder).check()
    with pytest.raises(CheckpointMissingError, match=rf"component {component}: there is no folder"):
        load(folder, component)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "is empty"), (LFS_POINTER, "Git LFS pointer"), (b"{", "not valid JSON"), (b"\xff{}", "not valid JSON"),
     (b"[1]", "holds a JSON list"), (b"{}", "states no class")],
)  # fmt: skip
@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder"])
def test_damaged_config(folder: Path, component: str, content: bytes, expected: str) -> None:
    overwrite(folder / component / "config.json", content)
    message = refused(folder, component)
    assert str(folder / component / "config.json") in message and expected in message


def test_absent_scheduler_config(folder: Path) -> None:
    (folder / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(CheckpointMissingError, match=r"scheduler_config\.json is missing"):
        Checkpoint.open(folder).check()


def test_deleted_tokenizer(folder: Path) -> None:
    shutil.rmtree(folder / "tokenizer_2")
    with pytest.raises(CheckpointMissingError, match=rf"component tokenizer_2 .*{folder / 'tokenizer_2'}"):
        Checkpoint.open(folder).check()
    with pytest.raises(CheckpointMissingError, match=rf"component tokenizer_2: .*{folder / 'tokenizer_2'}"):
        load(folder, "text_encoder_2")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", None, "component tokenizer_2: no vocabulary in"),
        ("tokenizer.json", b"", "is empty (0 bytes)"),
        ("tokenizer.json", LFS_POINTER, "is a Git LFS pointer"),
        ("tokenizer_config.json", None, "tokenizer_config.json is missing"),
        ("tokenizer_config.json", b"{", "is not valid JSON"),
    ],
)
def test_damaged_tokenizer(folder: Path, name: str, content: bytes | None, expected: str) -> None:
    path = folder / "tokenizer_2" / name
    path.unlink()
    if content is not None:
        overwrite(path, content)
    message = refused(folder, "text_encoder_2", CheckpointMissingError if content is None else CheckpointError)
    assert str(folder / "tokenizer_2") in message and expected in message


def test_package_that_a_sentencepiece_model_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer_2" / "tokenizer.json").unlink()
    overwrite(folder / "tokenizer_2" / "spiece.model", b"\n\x0e\n\x05<unk>")
    monkeypatch.setattr(component_folder, "find_spec", lambda name: None)
    message = refused(folder, "text_encoder_2")
    assert "component tokenizer_2" in message
    assert "reading spiece.model needs sentencepiece and protobuf" in message


def test_all_faults_are_counted(folder: Path) -> None:
    (folder / "vae" / NETWORK_FILE).unlink()
    (folder / "text_encoder" / "config.json").unlink()
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(CheckpointMissingError, match="and 2 more"):
        Checkpoint.open(folder).check()
    assert len(Checkpoint.open(folder).faults()) == 3
