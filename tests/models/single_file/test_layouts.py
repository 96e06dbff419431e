"""The authors' layouts: judged by diffusers' converters, found under every prefix, told apart by their shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kdit.errors import CheckpointError
from kdit.models.checkpoint import Checkpoint
from kdit.models.single_file.recognise import open_parts
from kdit.models.weights.tensor_reader import TensorReader
from tests.models.single_file import original_layout
from tests.models.single_file.files import equal, loaded, network_tensors, write
from tests.models.single_file.original_layout import WRITERS, Tensors

NETWORKS = [  # reference family, writer
    ("flux_dev", "flux"),
    ("flux_schnell", "flux"),
    ("sd3_medium", "sd3"),
    ("sd35_medium", "sd3"),
    ("wan21_t2v", "wan"),
    ("wan21_flf2v", "wan"),
    ("wan22_ti2v_5b", "wan"),
]
Family = Callable[[str], Path]


def converter(family: str) -> Callable[[Tensors], Tensors]:
    from diffusers.loaders import single_file_utils as utils

    functions: dict[str, Any] = {
        "flux": utils.convert_flux_transformer_checkpoint_to_diffusers,
        "sd3": utils.convert_sd3_transformer_checkpoint_to_diffusers,
        "wan": utils.convert_wan_transformer_to_diffusers,
    }
    return lambda tensors: functions[family](dict(tensors))


def read_all(path: Path) -> Tensors:
    (part,) = open_parts(path).parts
    with TensorReader() as reader:
        return {name: reader.read(info).clone() for name, info in part.tensors.items()}


@pytest.mark.parametrize(("name", "family"), [row for row in NETWORKS if row[1] != "flux"])
def test_names_are_those_of_diffusers_converter(
    name: str, family: str, reference_family: Family, tmp_path: Path
) -> None:
    stored = WRITERS[family](network_tensors(reference_family(name) / "model"))
    expected = converter(family)(stored)
    if "img_emb.emb_pos" in expected:  # the converter forgets the positions of first and last frame
        expected["condition_embedder.image_embedder.pos_embed"] = expected.pop("img_emb.emb_pos")
    assert equal(read_all(write(tmp_path / "x.safetensors", stored)), expected)


def test_flux_names_are_those_of_diffusers_converter(tmp_path: Path) -> None:
    """The converter knows one width, 3072; with few columns that is small enough."""
    g = torch.Generator().manual_seed(0)

    def rows(count: int, columns: int = 2) -> Tensor:
        return torch.randn(count, columns, generator=g)

    dim, stored = 3072, dict[str, Tensor]()
    linear = {"img_in": 1, "txt_in": 1, "final_layer.linear": 1, "final_layer.adaLN_modulation.1": 2}
    for part in ("time_in", "vector_in", "guidance_in"):
        linear |= {f"{part}.in_layer": 1, f"{part}.out_layer": 1}
    for i in range(2):
        for stream in ("img", "txt"):
            layers = {"mod.lin": 6, "attn.qkv": 3, "attn.proj": 1, "mlp.0": 4, "mlp.2": 1}
            linear |= {f"double_blocks.{i}.{stream}_{name}": width for name, width in layers.items()}
            for norm in ("query_norm", "key_norm"):
                stored[f"double_blocks.{i}.{stream}_attn.norm.{norm}.scale"] = torch.randn(128, generator=g)
    linear |= {"single_blocks.0.modulation.lin": 3, "single_blocks.0.linear1": 7, "single_blocks.0.linear2": 1}
    for norm in ("query_norm", "key_norm"):
        stored[f"single_blocks.0.norm.{norm}.scale"] = torch.randn(128, generator=g)
    for name, width in linear.items():
        stored[f"{name}.weight"], stored[f"{name}.bias"] = rows(width * dim), torch.randn(width * dim, generator=g)
    expected = converter("flux")(stored)
    assert len(expected) > len(stored) + 2 * 2 * 2 * 2
    assert equal(read_all(write(tmp_path / "x.safetensors", stored)), expected)
    assert equal(original_layout.flux(expected), stored)  # the writer of the other tests


PREFIXES = ["", "model.diffusion_model.", "diffusion_model.", "transformer."]


@pytest.mark.parametrize(
    ("name", "family", "prefix"),
    [("flux_dev", "flux", prefix) for prefix in PREFIXES]
    + [(name, family, PREFIXES[i % 4]) for i, (name, family) in enumerate(NETWORKS)],
)
@pytest.mark.parametrize("layout", ["authors", "diffusers"])
def test_a_file_loads_as_its_folder_does(
    name: str, family: str, layout: str, prefix: str, reference_family: Family, tmp_path: Path
) -> None:
    model = reference_family(name) / "model"
    tensors = network_tensors(model)
    path = write(tmp_path / "x.safetensors", WRITERS[family](tensors) if layout == "authors" else tensors, prefix)
    checkpoint = Checkpoint.open(path, model)
    assert not checkpoint.faults()
    assert equal(loaded(checkpoint), loaded(Checkpoint.open(model)))
    assert checkpoint.pipeline_class == Checkpoint.open(model).pipeline_class


@pytest.mark.parametrize("layout", ["authors", "diffusers"])
@pytest.mark.parametrize(
    ("in_channels", "expected"),
    [(16, "FluxPipeline"), (32, "FluxControlPipeline"), (96, "FluxFillPipeline")],
)
def test_flux_pipelines_are_told_apart_by_their_input(
    in_channels: int, expected: str, layout: str, reference_family: Family, tmp_path: Path
) -> None:
    model = reference_family("flux_dev") / "model"
    tensors = network_tensors(model)
    assert tensors["proj_out.weight"].shape[0] == 16
    tensors["x_embedder.weight"] = torch.ones(tensors["x_embedder.weight"].shape[0], in_channels)
    path = write(tmp_path / "x.safetensors", original_layout.flux(tensors) if layout == "authors" else tensors)
    checkpoint = Checkpoint.open(path, model)
    assert checkpoint.pipeline_class == expected
    assert checkpoint.component("transformer").config["in_channels"] == in_channels
    assert loaded(checkpoint)["img_in.weight"].shape[1] == in_channels


def test_the_folder_decides_between_pipelines_of_one_shape(reference_family: Family, tmp_path: Path) -> None:
    model = reference_family("flux_kontext") / "model"
    path = write(tmp_path / "x.safetensors", original_layout.flux(network_tensors(model)))
    assert Checkpoint.open(path, model).pipeline_class == "FluxKontextPipeline"
    assert Checkpoint.open(path, reference_family("flux_dev") / "model").pipeline_class == "FluxPipeline"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("authors", ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae")),
        ("diffusers", ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae")),
    ],
)
def test_published_sizes_need_no_config(layout: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    """A network of the published head width; its config comes from shapes alone, its scheduler is the published one."""
    from diffusers import FluxTransformer2DModel

    sizes = {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 1, "attention_head_dim": 128}
    net = FluxTransformer2DModel(
        **sizes, in_channels=8, joint_attention_dim=12, pooled_projection_dim=20, guidance_embeds=layout == "authors"
    )
    tensors = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    path = write(tmp_path / "x.safetensors", original_layout.flux(tensors) if layout == "authors" else tensors)
    checkpoint = Checkpoint.open(path)
    config = checkpoint.component("transformer").config
    own = {key: list(value) if isinstance(value, tuple) else value for key, value in net.config.items()}
    assert {**own, "out_channels": 8, "_class_name": "FluxTransformer2DModel"} == {**own, **config}
    assert checkpoint.scheduler_config()["use_dynamic_shifting"] is (layout == "authors")
    assert tuple(row.name for row in checkpoint.rows if row.state == "missing") == tuple(sorted(expected))


def test_wan_pipelines_are_told_apart(reference_family: Family, tmp_path: Path) -> None:
    def opened(name: str, components: Any = None) -> Checkpoint:
        model = reference_family(name) / "model"
        path = write(tmp_path / f"{name}.safetensors", original_layout.wan(network_tensors(model)))
        return Checkpoint.open(path, components or model)

    experts = opened("wan22_i2v_a14b")
    assert experts.pipeline_class == "WanImageToVideoPipeline"
    assert experts.options == {"boundary_ratio": 0.9}
    assert "transformer_2" in experts.components and "image_encoder" not in experts.components
    first_and_last = opened("wan21_flf2v")
    assert "image_encoder" in first_and_last.components and first_and_last.options == {}
    small = opened("wan21_t2v")
    assert small.pipeline_class == "WanPipeline" and "transformer_2" not in small.components
    both = opened("wan22_t2v_a14b")
    assert both.options == {"boundary_ratio": 0.875} and "transformer_2" in both.components


def test_the_second_expert_may_be_a_file(reference_family: Family, tmp_path: Path) -> None:
    model = reference_family("wan22_t2v_a14b") / "model"
    high = write(tmp_path / "high.safetensors", original_layout.wan(network_tensors(model)))
    low = write(
        tmp_path / "low.safetensors", original_layout.wan(network_tensors(model, "transformer_2")), "diffusion_model."
    )
    checkpoint = Checkpoint.open(high, {"base": model, "transformer_2": low})
    folder = Checkpoint.open(model)
    assert equal(loaded(checkpoint, "transformer_2"), loaded(folder, "transformer_2"))
    assert not equal(loaded(checkpoint), loaded(checkpoint, "transformer_2"))


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_unknown_names_are_shown(prefix: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {f"layers.{i}.weight": torch.ones(2) for i in range(7)}, prefix)
    with pytest.raises(
        CheckpointError, match=r"no model that kdit knows; its 7 tensors are called .*and 2 more"
    ) as error:
        Checkpoint.open(path)
    assert all(f"layers.{i}.weight" in str(error.value) for i in range(5))


def test_a_missing_and_a_strange_tensor_are_named(reference_family: Family, tmp_path: Path) -> None:
    model = reference_family("flux_dev") / "model"
    stored = original_layout.flux(network_tensors(model))
    stored["double_blocks.0.strange.weight"] = stored.pop("double_blocks.1.txt_mlp.2.bias")
    checkpoint = Checkpoint.open(write(tmp_path / "x.safetensors", stored), model)
    with pytest.raises(CheckpointError, match=r"missing: transformer_blocks\.1\.ff_context\.net\.2\.bias") as error:
        loaded(checkpoint)
    assert "have no place in FluxNetwork: double_blocks.0.strange.weight" in str(error.value)


def test_a_fused_tensor_that_cannot_be_split(reference_family: Family, tmp_path: Path) -> None:
    model = reference_family("flux_dev") / "model"
    stored = original_layout.flux(network_tensors(model))
    stored["double_blocks.0.img_attn.qkv.bias"] = torch.ones(7)
    with pytest.raises(
        CheckpointError, match=r"double_blocks\.0\.img_attn\.qkv\.bias has the shape \[7\].*multiple of 3"
    ):
        Checkpoint.open(write(tmp_path / "x.safetensors", stored), model)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_metadata_is_optional(metadata: dict[str, str] | None, reference_family: Family, tmp_path: Path) -> None:
    model = reference_family("flux_dev") / "model"
    save_file(original_layout.flux(network_tensors(model)), tmp_path / "x.safetensors", metadata=metadata)
    assert not Checkpoint.open(tmp_path / "x.safetensors", model).faults()
