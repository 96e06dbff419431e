"""Output files: what cannot be written is told first, what fails leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdit.errors import OutputError
from kdit.output_file import check_writable, whole_file


def test_unwritable_places_are_told(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("x")
    for path, message in {
        tmp_path / "a.jpg": r"must end in \.png",
        tmp_path / "noname": r"must end in \.png",
        tmp_path / "folder.png": "it is a folder",
        tmp_path / "missing/a.png": "missing' does not exist",
        tmp_path / "file/a.png": "file' is not a folder",
        tmp_path / ("x" * 300 + ".png"): "cannot write",
        Path("/proc/x.png"): "cannot write",
    }.items():
        with pytest.raises(OutputError, match=message):
            check_writable(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.png"]


def test_writable_places_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.png").write_text("x")
    check_writable(tmp_path / "new.PNG")
    check_writable(str(tmp_path / "old.png"))
    check_writable(tmp_path / "a.safetensors", (".png", ".safetensors"))
    with pytest.raises(OutputError, match=r"must end in \.png or \.safetensors"):
        check_writable(tmp_path / "a.gif", (".png", ".safetensors"))
    monkeypatch.chdir(tmp_path)
    check_writable("here.png")
    assert [p.name for p in tmp_path.iterdir()] == ["old.png"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_broken_write_keeps_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "a.png"
    target.write_bytes(b"old")
    with pytest.raises(error), whole_file(target) as file:
        file.write(b"half")
        raise error
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]
    with whole_file(target) as file:
        file.write(b"new")
    assert target.read_bytes() == b"new" and list(tmp_path.iterdir()) == [target]


def test_a_disk_that_refuses_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"), whole_file(tmp_path / "missing" / "a.png"):
        pass
