"""The Python of the README runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image


@pytest.mark.slow
def test_the_python_of_the_readme_runs(repository: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    script = "\n".join([*blocks, "assert len(pictures) == 2"])
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "heart.png") as heart:
        assert heart.size == (128, 128)
    assert "(42, 43)" in done.stdout
