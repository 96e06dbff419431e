"""The built-in model: complete, signed, and made by the recipe in ``training/``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

PACKAGES = {
    "@iconify-json/fluent-emoji-flat": ("1.2.6", "MIT", "Microsoft Corporation"),
    "@iconify-json/noto": ("1.2.9", "Apache-2.0", "Google Inc"),
    "unicode-emoji-json": ("0.9.0", "MIT", "Mu-An Chiou"),
    "emojilib": ("4.0.3", "MIT", "Mu-An Chiou"),
    "emojibase-data": ("17.0.0", "MIT", "Miles Johnson"),
}


def test_every_component_of_the_index_is_there(mini_dir: Path) -> None:
    index = json.loads((mini_dir / "model_index.json").read_text())
    components = {name for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None}
    assert components == {folder.name for folder in mini_dir.iterdir() if folder.is_dir()}
    assert "transformer" in components


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_weights_are_stored_in_half_size(mini_dir: Path, component: str) -> None:
    (file,) = (mini_dir / component).glob("*.safetensors")
    with safe_open(str(file), framework="pt") as weights:
        dtypes = {weights.get_slice(key).get_dtype() for key in weights.keys()}
    assert dtypes == {"BF16"}


def test_info_states_what_a_checkpoint_folder_cannot(mini_dir: Path) -> None:
    info = json.loads((mini_dir / "kdit.json").read_text())
    assert info["name"] == "mini"
    assert info["version"].count(".") == 2
    assert info["defaults"] == {"size": [128, 128], "steps": 24, "cfg_scale": 3.5, "max_sequence_length": 16}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_source_of_the_training_data_is_attributed(mini_dir: Path, repository: Path, package: str) -> None:
    version, licence, holder = PACKAGES[package]
    lines = json.loads((mini_dir / "kdit.json").read_text())["attribution"]
    assert any(f"{package} {version}" in line and licence in line and holder in line for line in lines)
    rows = (mini_dir / "ATTRIBUTION.md").read_text().splitlines()
    assert any(f"`{package}` | {version} |" in row and licence in row and holder in row for row in rows)
    assert f'"{package}": "{version}"' in (repository / "training" / "prepare_data.py").read_text()


@pytest.mark.slow
def test_the_recipe_builds_the_networks_of_the_built_in_model(mini_dir: Path, repository: Path) -> None:
    code = """
import json
from model import CLIP, T5, TRANSFORMER
from train_vae import VAE_CONFIG
print(json.dumps({"transformer": TRANSFORMER, "text_encoder": CLIP, "text_encoder_2": T5, "vae": VAE_CONFIG}))
"""
    run = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(run, cwd=repository / "training", capture_output=True, text=True, check=True)
    for component, recipe in json.loads(done.stdout.splitlines()[-1]).items():
        stored = json.loads((mini_dir / component / "config.json").read_text())
        # two follow from the data; an encoder alone has no output layer to tie
        other = {"scaling_factor", "shift_factor", "tie_word_embeddings"}
        different = {k: (v, stored.get(k)) for k, v in recipe.items() if k not in other and stored.get(k) != v}
        assert different == {}, component
