"""LOAD_MODEL: each kind of model reaches its pin; metadata that does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kdit.config import ExecuteConfig
from kdit.errors import CheckpointError, ConfigError
from kdit.keys import IONodeType, ModelKey
from kdit.models.flux.network import FluxNetwork
from kdit.models.model_pool import LoadedModel, ModelPool
from kdit.models.model_pool_key import ModelPoolKey
from kdit.models.text_encoder import TextEncoder
from kdit.nodes.core.device_info import DeviceInfo
from kdit.nodes.core.factory import IONodeFactory, create_node, declared_outputs
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_hub import PinHub
from kdit.tensor.tensor_pool import TensorPool

CPU = DeviceInfo(torch.device("cpu"), torch.device("cpu"), 0, 1)


@pytest.fixture
def model(reference_family: Callable[[str], Path]) -> Path:
    return reference_family("flux_dev") / "model"


def load(key: ModelKey, *, execute_config: ExecuteConfig | None = None, **metadata: object) -> LoadedModel:
    """Run the key's loader as the executor does and take the model from the pool."""
    node_def = NodeDef(IONodeType.LOAD_MODEL, key)
    pool = ModelPool()
    pins = PinHub(
        node_def,
        input_defs=(),
        output_defs=declared_outputs(node_def),
        input_pins={},
        tensor_pool=TensorPool(),
        model_pool=pool,
    )
    context = NodeContext(metadata=dict(metadata), execute_config=execute_config, device=CPU)
    create_node(node_def).run(pins, context=context)
    assert pool.keys() == (ModelPoolKey(node_def.node_id, key),)
    return pool.get(pool.keys()[0])


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_network(model: Path, batch_invariant: bool) -> None:
    config = ExecuteConfig(batch_invariant=batch_invariant)
    net = load(ModelKey.FLUX1, path=str(model / "transformer"), dtype="bfloat16", execute_config=config)
    assert isinstance(net, FluxNetwork)
    assert net.ops.batch_invariant is batch_invariant
    assert {p.dtype for p in net.parameters() if not p.is_meta} == {torch.bfloat16}


@pytest.mark.parametrize("modulation", ["table", "inline"])
def test_modulation_weights_are_in_memory_only_where_the_loop_needs_them(model: Path, modulation: str) -> None:
    config = ExecuteConfig(modulation=modulation)  # type: ignore[arg-type]
    net = load(ModelKey.FLUX1, path=str(model / "transformer"), execute_config=config)
    assert isinstance(net, FluxNetwork)
    absent = {name.split(".")[0] for name, p in net.named_parameters() if p.is_meta}
    assert absent == (set(net.streamed) if modulation == "table" else set())


def test_text_encoder(model: Path) -> None:
    encoder = load(
        ModelKey.T5TextEncoder,
        path=str(model / "text_encoder_2"),
        tokenizer_path=str(model / "tokenizer_2"),
        dtype="float16",
    )
    assert isinstance(encoder, TextEncoder)
    assert type(encoder.model).__name__ == "T5EncoderModel"
    assert encoder.tokenizer("fox").input_ids
    assert torch.float16 in {p.dtype for p in encoder.model.parameters()}


def test_autoencoder(model: Path) -> None:
    vae = load(ModelKey.VAE_KL, path=str(model / "vae"), tokenizer_path=None)
    assert isinstance(vae, torch.nn.Module) and type(vae).__name__ == "AutoencoderKL"
    assert {p.dtype for p in vae.parameters()} == {torch.float32}


@pytest.mark.parametrize("key", list(ModelKey), ids=lambda key: key.name)
def test_every_model_key_has_a_loader_with_one_output(key: ModelKey) -> None:
    assert IONodeFactory.node_class(IONodeType.LOAD_MODEL, key).output_defs == [key]


def test_network_of_another_family(model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'FluxTransformer2DModel', expected SD3Transformer2DModel for SD3"):
        load(ModelKey.SD3, path=str(model / "transformer"))
    with pytest.raises(CheckpointError, match=r"'AutoencoderKL', expected FluxTransformer2DModel for FLUX1"):
        load(ModelKey.FLUX1, path=str(model / "vae"))


@pytest.mark.parametrize(
    ("key", "metadata", "expected"),
    [
        (ModelKey.FLUX1, {"path": "x", "dtyp": "float32"}, "unknown metadata 'dtyp'"),
        (ModelKey.FLUX1, {"dtype": "float32"}, "missing metadata 'path'"),
        (ModelKey.FLUX1, {"path": "x", "dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        (ModelKey.FLUX1, {"path": "x", "tokenizer_path": "y"}, "only encoders take 'tokenizer_path'"),
        (ModelKey.VAE_KL, {"path": "x", "tokenizer_path": "y"}, "only encoders take 'tokenizer_path'"),
        (ModelKey.CLIPTextEncoder, {"path": "x"}, "a text encoder needs metadata 'tokenizer_path'"),
    ],
)
def test_metadata_that_does_not_fit(key: ModelKey, metadata: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(key, **metadata)
