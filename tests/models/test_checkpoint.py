"""Opening a folder: index, components, options, kdit.json, and what is told about folders that are none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kdit.errors import CheckpointError, CheckpointMissingError
from kdit.keys import PipelineKey
from kdit.models.checkpoint import Checkpoint, resolve_model_path
from kdit.models.checkpoint_info import CheckpointDefaults, CheckpointInfo
from kdit.models.weights.component_folder import ComponentFolder, ComponentKind
from tests.models.checkpoint_files import clone, edit_json, overwrite

COMPONENTS = {"scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae"}


@pytest.fixture
def folder(reference_family: Callable[[str], Path], tmp_path: Path) -> Path:
    return clone(reference_family("flux_dev") / "model", tmp_path / "model")


def test_components_and_their_configs(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.pipeline_class == "FluxPipeline"
    assert checkpoint.pipeline_keys() == (PipelineKey.FLUX1_T2I,)
    assert checkpoint.components.keys() == COMPONENTS  # the null ones are left out
    transformer = checkpoint.component("transformer")
    assert (transformer.path, transformer.library) == (folder / "transformer", "diffusers")
    assert transformer.class_name == transformer.config["_class_name"] == "FluxTransformer2DModel"
    assert checkpoint.component("text_encoder_2").config["architectures"] == ["T5EncoderModel"]
    assert checkpoint.scheduler_config()["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    kinds = {name: component.kind for name, component in checkpoint.components.items()}
    assert {name for name, kind in kinds.items() if kind is ComponentKind.MODEL} == {
        "text_encoder", "text_encoder_2", "transformer", "vae"
    }  # fmt: skip
    assert kinds["tokenizer_2"] is ComponentKind.TOKENIZER and kinds["scheduler"] is ComponentKind.SCHEDULER


def test_unknown_component(folder: Path) -> None:
    with pytest.raises(CheckpointMissingError, match=r"has no component 'transformer_2'; it lists .*transformer"):
        Checkpoint.open(folder).component("transformer_2")


def test_options_are_the_scalars_of_the_index(folder: Path) -> None:
    edit_json(
        folder / "model_index.json", boundary_ratio=0.875, is_distilled=False, note="x", sizes=[1, 2, 3][:0] or {}
    )
    assert Checkpoint.open(folder).options == {"boundary_ratio": 0.875, "is_distilled": False, "note": "x"}


def test_unknown_pipeline_is_told_with_the_known_ones(folder: Path) -> None:
    edit_json(folder / "model_index.json", _class_name="PixArtSigmaPipeline")
    with pytest.raises(CheckpointError, match=r"_class_name is 'PixArtSigmaPipeline'.*FluxPipeline"):
        Checkpoint.open(folder).pipeline_keys()


@pytest.mark.parametrize("entry", [["diffusers"], ["diffusers", None], ["a", "b", "c"], ["diffusers", 3]])
def test_malformed_component_entry(folder: Path, entry: list[object]) -> None:
    edit_json(folder / "model_index.json", vae=entry)
    with pytest.raises(CheckpointError, match=r"model_index\.json: 'vae' is .* expected \[library, class\]"):
        Checkpoint.open(folder)


def test_component_outside_the_folder(folder: Path) -> None:
    edit_json(folder / "model_index.json", **{"../secret": ["diffusers", "AutoencoderKL"]})
    with pytest.raises(CheckpointError, match=r"'\.\./secret'"):
        Checkpoint.open(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissingError, match=rf"there is no model folder {tmp_path / 'nowhere'}$"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointMissingError, match="download the model first"):
        Checkpoint.open("some-lab/some-model")


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "model.ckpt"])
def test_single_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"{name} is no safetensors file: it begins with b'x'"):
        Checkpoint.open(tmp_path / name)
    with pytest.raises(CheckpointMissingError, match=rf"it holds {name}; give the path of the file itself"):
        Checkpoint.open(tmp_path)


def test_folders_that_are_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointMissingError, match=r"has no model_index\.json: .* one component .* the folder above it"
    ):
        Checkpoint.open(folder / "transformer")
    (folder / "model_index.json").rename(folder / "modular_model_index.json")
    with pytest.raises(
        CheckpointMissingError, match=r"modular pipeline \(modular_model_index\.json\).*not supported yet"
    ):
        Checkpoint.open(folder)
    (folder / "modular_model_index.json").unlink()
    with pytest.raises(CheckpointMissingError, match=r"it holds scheduler, text_encoder.*; expected a folder"):
        Checkpoint.open(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointMissingError, match="it holds nothing"):
        Checkpoint.open(tmp_path / "empty")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"version https://git-lfs.github.com/spec/v1\n"])
def test_damaged_index(folder: Path, content: bytes) -> None:
    overwrite(folder / "model_index.json", content)
    with pytest.raises(CheckpointError, match=r"model_index\.json (is|holds|has)"):
        Checkpoint.open(folder)


def test_folder_without_kdit_json_has_empty_info(folder: Path) -> None:
    assert Checkpoint.open(folder).info == CheckpointInfo()


def test_kdit_json(folder: Path) -> None:
    defaults = {"size": [64, 96], "steps": 3, "cfg_scale": 2, "guidance_scale": 3.5, "max_sequence_length": 16}
    table = {"name": "tiny", "version": "1.2", "attribution": "nobody", "defaults": defaults}
    overwrite(folder / "kdit.json", json.dumps(table).encode())
    info = Checkpoint.open(folder).info
    assert (info.name, info.version, info.attribution) == ("tiny", "1.2", ("nobody",))
    assert info.defaults == CheckpointDefaults(
        size=(64, 96), steps=3, cfg_scale=2, guidance_scale=3.5, max_sequence_length=16
    )


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"defaults": {"step": 3, "cfg": 1}}, r'"defaults": unknown \'step\', \'cfg\'; known: size, steps'),
        ({"title": "x"}, r"kdit\.json: unknown 'title'; known: name, version"),
        ({"defaults": [1]}, r"defaults is \[1\], expected an object"),
        ({"defaults": {"steps": 0}}, r'"defaults": .*steps must be a whole number from 1 to 10000, got 0'),
        ({"defaults": {"steps": True}}, r"steps must be"),
        ({"defaults": {"size": 64}}, r"size is 64, expected \[width, height\]"),
        ({"defaults": {"size": [64, 0]}}, r"size must be \(width, height\)"),
        ({"defaults": {"cfg_scale": "high"}}, r"cfg_scale must be a finite number"),
        ({"name": 3}, r"name is 3, expected a string"),
        ({"attribution": [1]}, r"attribution is \[1\], expected a string or a list of strings"),
    ],
)
def test_kdit_json_is_read_strictly(folder: Path, table: dict[str, object], expected: str) -> None:
    overwrite(folder / "kdit.json", json.dumps(table).encode())
    with pytest.raises(CheckpointError, match=expected) as error:
        Checkpoint.open(folder)
    assert str(folder / "kdit.json") in str(error.value)


def test_the_built_in_model_by_its_name(mini_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mini").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("mini").samefile(mini_dir)
    assert resolve_model_path("./mini").samefile(tmp_path / "mini")
    checkpoint = Checkpoint.open("mini")
    checkpoint.check()
    assert (
        checkpoint.info.name == "mini" and checkpoint.info.attribution and checkpoint.info.defaults.size == (128, 128)
    )


def test_a_component_by_its_own_folder(folder: Path) -> None:
    assert ComponentFolder.at(folder / "transformer").class_name == "FluxTransformer2DModel"
    assert ComponentFolder.at(str(folder / "text_encoder")).class_name == "CLIPTextModel"


def test_opening_imports_no_heavy_library(mini_dir: Path) -> None:
    program = (
        "import sys; from kdit.models.checkpoint import Checkpoint; Checkpoint.open(sys.argv[1]).check();"
        "print([name for name in ('torch', 'transformers', 'diffusers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(mini_dir)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
