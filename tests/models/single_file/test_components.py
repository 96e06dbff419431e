"""What a file holds beside the network, what has to come from elsewhere, and how that is told."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kdit.errors import CheckpointError, CheckpointMissingError, InputError
from kdit.models.checkpoint import Checkpoint
from kdit.models.single_file.component_table import render
from kdit.models.single_file.file_component import locator, open_component
from kdit.models.text_encoder import load_text_encoder
from kdit.models.vae import load_vae
from tests.models.single_file import original_layout
from tests.models.single_file.files import WEIGHTS, equal, loaded, network_tensors, write

Family = Callable[[str], Path]
SD3_ENCODERS = {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5xxl"}


def text_tensors(model: Path, name: str, *, prefixed: bool = True) -> dict[str, Tensor]:
    """As transformers' published files have them: CLIP below text_model."""
    tensors = load_file(model / name / "model.safetensors")
    if not prefixed or not any("token_embedding" in key for key in tensors):
        return tensors
    bare = {key.removeprefix("text_model."): tensor for key, tensor in tensors.items()}
    return {key if key.startswith("text_projection") else f"text_model.{key}": tensor for key, tensor in bare.items()}


def whole(model: Path, path: Path) -> Path:
    """SD3 with everything in one file, as ComfyUI's packers and the authors write it."""
    tensors = {f"model.diffusion_model.{k}": v for k, v in original_layout.sd3(network_tensors(model)).items()}
    vae = original_layout.vae(load_file(model / "vae" / WEIGHTS))
    tensors |= {f"first_stage_model.{k}": v for k, v in vae.items()}
    for component, part in SD3_ENCODERS.items():
        tensors |= {f"text_encoders.{part}.transformer.{k}": v for k, v in text_tensors(model, component).items()}
    tensors["text_encoders.clip_l.logit_scale"] = torch.ones(())
    return write(path, tensors)


def state(checkpoint: Checkpoint, name: str, model: Path) -> dict[str, Tensor]:
    component = open_component(**locator(checkpoint.component(name)))  # type: ignore[arg-type]
    if name == "vae":
        return load_vae(component, dtype=torch.float32, device="cpu").state_dict()
    tokenizer = model / name.replace("text_encoder", "tokenizer")
    return load_text_encoder(component, tokenizer, dtype=torch.float32, device="cpu").model.state_dict()


@pytest.fixture
def sd3(reference_family: Family) -> Path:
    return reference_family("sd3_medium") / "model"


@pytest.fixture
def flux(reference_family: Family) -> Path:
    return reference_family("flux_dev") / "model"


def states(checkpoint: Checkpoint) -> dict[str, str]:
    return {row.name: row.state for row in checkpoint.rows}


def test_the_autoencoder_is_what_diffusers_converter_makes(sd3: Path) -> None:
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    diffusers = load_file(sd3 / "vae" / WEIGHTS)
    stored = original_layout.vae(diffusers)
    levels = {"down_block_types": [""] * 4, "up_block_types": [""] * 4}
    assert equal(convert_ldm_vae_checkpoint(dict(stored), levels), diffusers)


def test_the_autoencoder_of_wan(reference_family: Family, tmp_path: Path) -> None:
    """Published structure, for which diffusers' converter has its table; other sizes by the writer it agrees with."""
    import inspect

    from diffusers import AutoencoderKLWan
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    published = AutoencoderKLWan(base_dim=4)
    stored = original_layout.wan_vae(dict(published.state_dict()))
    assert equal(convert_wan_vae_to_diffusers(dict(stored)), published.state_dict())

    model = reference_family("wan21_t2v") / "model"
    network = write(tmp_path / "x.safetensors", original_layout.wan(network_tensors(model)))
    for tensors, spelling in ((stored, "stored"), (published.state_dict(), "diffusers")):
        file = write(tmp_path / f"{spelling}.safetensors", tensors)
        checkpoint = Checkpoint.open(network, {"base": model, "vae": file})
        assert equal(state(checkpoint, "vae", model), published.state_dict())
        config = checkpoint.component("vae").config
        own = {key: list(value) if isinstance(value, tuple) else value for key, value in published.config.items()}
        scaled = ("latents_mean", "latents_std")  # of the folder's, which is of as many channels
        assert {key: own.get(key) for key in config if key not in scaled and key[0] != "_"} == {
            key: value for key, value in config.items() if key not in scaled and key[0] != "_"
        }
        assert config["latents_mean"] == Checkpoint.open(model).component("vae").config["latents_mean"]
    small = load_file(model / "vae" / WEIGHTS)
    file = write(tmp_path / "small.safetensors", original_layout.wan_vae(small))
    assert equal(state(Checkpoint.open(model, {"vae": file}), "vae", model), small)

    from kdit.models.wan.vae_file import LATENTS_MEAN, LATENTS_STD

    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
    assert tuple(LATENTS_MEAN) == tuple(defaults["latents_mean"].default)
    assert tuple(LATENTS_STD) == tuple(defaults["latents_std"].default)


def test_a_whole_checkpoint_supplies_its_own_models(sd3: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(whole(sd3, tmp_path / "x.safetensors"), sd3)
    own = {row.name for row in checkpoint.rows if str(tmp_path) in row.source}
    assert own == {"transformer", "vae", *SD3_ENCODERS}
    folder = Checkpoint.open(sd3)
    for name in ("vae", *SD3_ENCODERS):
        assert equal(state(checkpoint, name, sd3), state(folder, name, sd3)), name
    assert equal(loaded(checkpoint), loaded(folder))
    assert not checkpoint.faults()


def test_configs_of_encoders_come_from_shapes(flux: Path, sd3: Path, tmp_path: Path) -> None:
    """Where the folder's own config cannot be used: nothing but what the published encoders have in common."""
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    from kdit.models.single_file.text_encoders import config_from_shapes, recognise_text_encoder
    from kdit.models.weights.header import read_header

    clip = CLIPTextModel(CLIPTextConfig(hidden_size=128, intermediate_size=96, num_attention_heads=2, vocab_size=40))
    sizes: dict[str, Any] = {"d_model": 24, "d_kv": 6, "d_ff": 20, "num_heads": 5, "num_layers": 2, "vocab_size": 30}
    gated = {"feed_forward_proj": "gated-gelu"}
    models = (clip, T5EncoderModel(T5Config(**sizes, **gated)), UMT5EncoderModel(UMT5Config(**sizes, **gated)))
    for model in models:
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder)
        found = recognise_text_encoder(read_header(folder / "model.safetensors"))
        assert found is not None and found[0] == type(model).__name__
        config = config_from_shapes(found[0], {name: info.shape for name, info in found[1].items()}, {})
        own = model.config.to_dict()
        differing = {key for key, value in config.items() if own.get(key) != value}
        # the test's CLIP has the tokens of a newer release, and names its projection
        free = {"eos_token_id", "bos_token_id", "pad_token_id", "projection_dim", "tie_word_embeddings"}
        assert differing <= free | {"is_encoder_decoder"}  # which an encoder by itself does not read


@pytest.mark.parametrize("prefixed", [True, False])
def test_single_encoders_and_autoencoder_as_files(prefixed: bool, flux: Path, tmp_path: Path) -> None:
    network = write(tmp_path / "x.safetensors", original_layout.flux(network_tensors(flux)))
    clip = {**text_tensors(flux, "text_encoder", prefixed=prefixed), "logit_scale": torch.ones(())}
    clip["text_projection.weight"] = torch.ones(3, 3)  # which FLUX.1 does not read
    vae = load_file(flux / "vae" / WEIGHTS)
    given: dict[str, str | Path | None] = {
        "base": flux,
        "text_encoder": write(tmp_path / "clip.safetensors", clip),
        "text_encoder_2": str(write(tmp_path / "t5.safetensors", text_tensors(flux, "text_encoder_2"))),
        "vae": write(tmp_path / "ae.safetensors", original_layout.vae(vae) if prefixed else vae),
        "tokenizer": flux / "tokenizer",
        "tokenizer_2": flux,  # a folder of a whole pipeline has it below
        "scheduler": flux / "scheduler",
    }
    checkpoint, folder = Checkpoint.open(network, given), Checkpoint.open(flux)
    assert not checkpoint.faults()
    for name in ("vae", "text_encoder", "text_encoder_2"):
        assert checkpoint.component(name).path.is_file()
        assert equal(state(checkpoint, name, flux), state(folder, name, flux)), name
    assert checkpoint.component("tokenizer_2").path == flux / "tokenizer_2"
    assert checkpoint.scheduler_config() == folder.scheduler_config()


def test_an_fp8_encoder_as_a_file(flux: Path, tmp_path: Path) -> None:
    tensors = text_tensors(flux, "text_encoder_2")
    layer = "encoder.block.0.layer.1.DenseReluDense.wo"
    expected = dict(tensors)
    tensors[f"{layer}.weight"] = (tensors[f"{layer}.weight"] / 0.01).to(torch.float8_e4m3fn)
    expected[f"{layer}.weight"] = tensors[f"{layer}.weight"].float() * torch.tensor(0.01)
    tensors |= {f"{layer}.scale_weight": torch.tensor(0.01), "scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    found = Checkpoint.open(flux, {"text_encoder_2": write(tmp_path / "t5.safetensors", tensors)})
    twin = Checkpoint.open(flux, {"text_encoder_2": write(tmp_path / "twin.safetensors", expected)})
    assert equal(state(found, "text_encoder_2", flux), state(twin, "text_encoder_2", flux))


def test_what_is_missing_is_listed_with_its_option(sd3: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", original_layout.sd3(network_tensors(sd3)), "model.diffusion_model.")
    given = {"transformer": sd3 / "transformer"}
    with pytest.raises(CheckpointError, match="is the transformer itself"):
        Checkpoint.open(path, given)
    checkpoint = Checkpoint.open(path)  # of a width that no published model has
    assert states(checkpoint)["transformer"] == "incomplete" and states(checkpoint)["vae"] == "missing"
    lacks, unknown = checkpoint.faults()
    assert "--components FOLDER supplies attention_head_dim" in lacks.table
    assert "attention_head_dim is unknown" in str(unknown) and "--components FOLDER" in str(unknown)
    assert states(Checkpoint.open(path, sd3))["transformer"] == "found"
    tensors = network_tensors(sd3)
    path = write(tmp_path / "vae.safetensors", {
        **{f"model.diffusion_model.{k}": v for k, v in original_layout.sd3(norms(tensors)).items()},
        **{f"vae.{k}": v for k, v in original_layout.vae(load_file(sd3 / "vae" / WEIGHTS)).items()},
    })  # fmt: skip
    checkpoint = Checkpoint.open(path)
    assert states(checkpoint) == {
        "transformer": "found", "scheduler": "published", "vae": "found",
        **dict.fromkeys([*SD3_ENCODERS, "tokenizer", "tokenizer_2", "tokenizer_3"], "missing"),
    }  # fmt: skip
    (fault,) = checkpoint.faults()
    assert isinstance(fault, CheckpointMissingError)
    assert str(path) in str(fault) and "--components FOLDER" in str(fault) and fault.table == render(checkpoint.rows)
    assert fault.table in str(fault) and "None leaves text_encoder_3 out" in str(fault)
    assert "--components text_encoder=PATH\n" in str(fault)
    assert "--components text_encoder_3=PATH, or text_encoder_3=none" in str(fault)
    with pytest.raises(CheckpointMissingError, match="lacks text_encoder, text_encoder_2"):
        checkpoint.check()


def norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With norms of queries and keys, which show the width of the heads."""
    more = {
        f"transformer_blocks.{i}.attn.{name}.weight": torch.ones(20)
        for i in range(3)
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    }
    return {**tensors, **more}


def test_t5_is_left_out_on_purpose_only(sd3: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", original_layout.sd3(network_tensors(sd3)))
    assert "text_encoder_3" in Checkpoint.open(path, sd3).components
    checkpoint = Checkpoint.open(path, {"base": sd3, "text_encoder_3": None})
    assert states(checkpoint)["text_encoder_3"] == states(checkpoint)["tokenizer_3"] == "left out"
    assert checkpoint.index["text_encoder_3"] == [None, None] == checkpoint.index["tokenizer_3"]
    assert not {"text_encoder_3", "tokenizer_3"} & checkpoint.components.keys()
    assert not checkpoint.faults()
    assert checkpoint.supplied == {"base": str(sd3), "text_encoder_3": None}
    again = Checkpoint.open(path, checkpoint.supplied)
    assert again.components == checkpoint.components and again.index == checkpoint.index
    folder = Checkpoint.open(sd3, {"text_encoder_3": None})
    assert folder.components.keys() == checkpoint.components.keys()
    for name in ("text_encoder_2", "transformer"):
        with pytest.raises(CheckpointError, match=rf"{name} cannot be left out of Stable.*; text_encoder_3 can"):
            Checkpoint.open(sd3, {name: None})


def test_components_of_a_folder_can_be_replaced(flux: Path, tmp_path: Path) -> None:
    changed = {name: tensor + 1 for name, tensor in network_tensors(flux).items()}
    file = write(tmp_path / "x.safetensors", original_layout.flux(changed))
    checkpoint = Checkpoint.open(flux, {"transformer": file})
    assert not checkpoint.faults() and checkpoint.component("vae").path == flux / "vae"
    assert not equal(loaded(checkpoint), loaded(Checkpoint.open(flux)))
    twin = Checkpoint.open(write(tmp_path / "y.safetensors", changed), flux)
    assert equal(loaded(checkpoint), loaded(twin))
    assert checkpoint.weight_hash() != Checkpoint.open(flux).weight_hash()


def test_the_hash_is_of_all_weights(flux: Path, tmp_path: Path) -> None:
    def opened(folder: Path, change: float = 0) -> Checkpoint:
        folder.mkdir(exist_ok=True)
        tensors = network_tensors(flux)
        tensors["x_embedder.bias"] += change
        return Checkpoint.open(write(folder / "x.safetensors", tensors), flux)

    first = opened(tmp_path / "a").weight_hash()
    assert opened(tmp_path / "b").weight_hash() == first
    assert opened(tmp_path / "a", 1).weight_hash() != first


def test_wrong_components_are_refused(flux: Path, sd3: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", original_layout.flux(network_tensors(flux)))
    clip = write(tmp_path / "clip.safetensors", text_tensors(flux, "text_encoder"))
    cases: list[tuple[Any, type[Exception], str]] = [
        (sd3, CheckpointError, r"has SD3Transformer2DModel, expected one of a FLUX\.1 pipeline"),
        ({"base": flux, "vea": flux}, CheckpointError, r"components names 'vea'; FluxPipeline has transformer, .*vae"),
        (
            {"base": flux, "vae": clip},
            CheckpointError,
            r"components\['vae'\]: .*holds CLIPTextModel, expected one Auto",
        ),
        ({"base": flux, "vae": tmp_path / "no"}, CheckpointMissingError, r"components\['vae'\]: there is no folder"),
        ({"base": flux, "text_encoder_2": clip}, CheckpointError, r"holds CLIPTextModel, expected one T5EncoderModel"),
        (
            {"base": flux, "text_encoder_2": flux / "text_encoder"},
            CheckpointError,
            r"components\['text_encoder_2'\]: .*text_encoder is a CLIPTextModel, expected a T5EncoderModel",
        ),
        ({"base": clip}, CheckpointError, r"is a file, expected a folder with model_index"),
        (tmp_path / "no", CheckpointMissingError, r"there is no model folder"),
        (7, InputError, r"components is 7, expected a folder or a mapping"),
        ({"vae": 7}, InputError, r"components\['vae'\] is 7, expected"),
        ({"vae": ""}, InputError, r"components\['vae'\] is '', expected"),
        ({"base": None}, InputError, r"leave it out of the mapping"),
    ]
    for components, error, message in cases:
        with pytest.raises(error, match=message):
            Checkpoint.open(path, components)
    with pytest.raises(CheckpointError, match="would supply nothing"):
        Checkpoint.open(flux, sd3)
    with pytest.raises(CheckpointError, match=r"no text_projection\.weight, which CLIPTextModelWithProjection needs"):
        Checkpoint.open(sd3, {"text_encoder": clip})


def test_a_file_without_a_network_says_what_it_is(flux: Path, tmp_path: Path) -> None:
    clip = write(tmp_path / "clip.safetensors", text_tensors(flux, "text_encoder"))
    with pytest.raises(CheckpointError, match=r"holds no diffusion transformer, only CLIPTextModel; give") as caught:
        Checkpoint.open(clip, flux)
    network, place = caught.value.table.splitlines()
    assert network.split()[:2] == ["transformer", "missing"]
    assert place.split() == ["text_encoder", "found", "for", "FLUX.1:", "--components", f"text_encoder={clip}"]
    assert "text_encoder" in Checkpoint.open(flux, {"text_encoder": clip}).components


def test_parts_without_a_network_say_where_they_belong(flux: Path, sd3: Path, tmp_path: Path) -> None:
    t5 = text_tensors(flux, "text_encoder_2")
    fp8 = {name: tensor.to(torch.float8_e4m3fn) if tensor.ndim == 2 else tensor for name, tensor in t5.items()}
    both = {f"text_encoders.clip_g.{name}": tensor for name, tensor in text_tensors(sd3, "text_encoder_2").items()}
    both |= {f"vae.{name}": tensor for name, tensor in load_file(sd3 / "vae" / WEIGHTS).items()}
    cases = [
        (write(tmp_path / "t5.safetensors", fp8), {"text_encoder_2": "FLUX.1", "text_encoder_3": "Stable Diffusion 3"}),
        (write(tmp_path / "both.safetensors", both), {"text_encoder_2": "Stable Diffusion 3", "vae": "FLUX.1"}),
    ]
    for path, expected in cases:
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(path)
        lines = caught.value.table.splitlines()
        for component, title in expected.items():
            assert any(
                line.split()[0] == component and f"for {title}: --components {component}={path}" in line
                for line in lines
            ), (component, lines)


def test_tensors_that_nobody_reads_are_told(flux: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = {f"model.diffusion_model.{k}": v for k, v in original_layout.flux(network_tensors(flux)).items()}
    tensors["conditioner.embedders.0.weight"] = torch.ones(1)
    with caplog.at_level(logging.WARNING):
        Checkpoint.open(write(tmp_path / "x.safetensors", tensors), flux)
    assert "1 tensors are not read: conditioner.embedders.0.weight" in caplog.text


def test_a_scheduler_of_another_network_is_not_taken(reference_family: Family, tmp_path: Path) -> None:
    dev, schnell = (reference_family(f"flux_{name}") / "model" for name in ("dev", "schnell"))
    path = write(tmp_path / "x.safetensors", original_layout.flux(network_tensors(schnell)))
    checkpoint = Checkpoint.open(path, dev)
    assert states(checkpoint)["scheduler"] == "published"
    assert checkpoint.scheduler_config()["use_dynamic_shifting"] is False
    assert states(Checkpoint.open(path, schnell))["scheduler"] == "found"


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.canary,)


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt", ".pt", ".bin", ".gguf", ".sft"])
@pytest.mark.parametrize("form", ["torch", "legacy", "pickle", "ascii"])
def test_pickles_are_never_opened(suffix: str, form: str, flux: Path, tmp_path: Path) -> None:
    path, canary = tmp_path / f"x{suffix}", tmp_path / "canary"
    if form in ("torch", "legacy"):
        torch.save({"x": Bomb(canary)}, path, _use_new_zipfile_serialization=form == "torch")
    else:
        path.write_bytes(pickle.dumps(Bomb(canary), protocol=0 if form == "ascii" else 4))
    for components in (flux, {"base": flux, "vae": path}):
        model = path if components is flux else write(tmp_path / "ok.safetensors", network_tensors(flux))
        with pytest.raises(CheckpointError, match=r"pickle|no safetensors file"):
            Checkpoint.open(model, components)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Bomb(canary)))  # the bomb works
    assert canary.exists()
