"""The Python of the README runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image


@pytest.mark.slow
def test_the_python_of_the_readme_runs(
    repository: Path, reference_family: Callable[[str], Path], tmp_path: Path
) -> None:
    *blocks, video = re.findall(r"```python\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    # The model of the last one has billions of weights; a tiny one of the same form stands for it.
    video = video.replace("path/to/Wan2.2-I2V-A14B-Diffusers", str(reference_family("wan22_i2v_a14b") / "model"))
    video = video.replace("(1280, 720)", "(64, 48)").replace("frame_num=81", "frame_num=5")
    for name in ("first.png", "last.png"):
        Image.new("RGB", (64, 48), "teal").save(tmp_path / name)
    script = "\n".join([*blocks, "assert len(pictures) == 2", video, "assert result.video.shape == (1, 5, 48, 64, 3)"])
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "snow.mp4").stat().st_size > 0
    with Image.open(tmp_path / "heart.png") as heart:
        assert heart.size == (128, 128)
    assert "(42, 43)" in done.stdout
