import pytest
import torch

from kdit.errors import PinError, PinTypeError
from kdit.keys import InferNodeType, ModelKey, RunId, TensorKey
from kdit.models.model_pool import ModelPool
from kdit.models.model_pool_key import ModelPoolKey
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import InputPins
from kdit.nodes.core.pin_hub import PinHub
from kdit.tensor.tensor_pool import TensorPool
from kdit.tensor.tensor_pool_key import TensorPoolKey

UP = TensorPoolKey(901, TensorKey.IMAGE)
LOADER = ModelPoolKey(902, ModelKey.T5TextEncoder)


def make_hub(node_def: NodeDef, pins: InputPins, tensors: TensorPool, models: ModelPool) -> PinHub:
    return PinHub(
        node_def,
        input_defs=[TensorKey.START_IMG, TensorKey.END_IMG, ModelKey.VAE_KL, ModelKey.T5TextEncoder],
        output_defs=[TensorKey.LATENTS, ModelKey.SD3],
        input_pins=pins,
        tensor_pool=tensors,
        model_pool=models,
        run=RunId("r"),
    )


def test_reads_through_its_edges_under_its_own_names() -> None:
    tensors, models = TensorPool(), ModelPool()
    tensors.put(UP, torch.ones(3))
    models.put(LOADER, "encoder")
    node_def = NodeDef(InferNodeType.VAE_ENCODE_SPATIAL, ModelKey.VAE_KL)
    hub = make_hub(node_def, {TensorKey.START_IMG: UP, ModelKey.T5TextEncoder: LOADER}, tensors, models)
    value = hub.get_tensor(TensorKey.START_IMG)
    assert value is not None
    assert torch.equal(value.tensors()[0], torch.ones(3))
    assert hub.has_tensor(TensorKey.START_IMG)
    assert hub.get_model(ModelKey.T5TextEncoder) == "encoder"
    assert hub.run == "r"


def test_an_open_tensor_pin_is_none() -> None:
    hub = make_hub(NodeDef(InferNodeType.VAE_ENCODE_SPATIAL), {}, TensorPool(), ModelPool())
    assert hub.get_tensor(TensorKey.END_IMG) is None
    assert not hub.has_tensor(TensorKey.END_IMG)


def test_a_connected_tensor_that_is_gone_raises() -> None:
    hub = make_hub(NodeDef(InferNodeType.VAE_ENCODE_SPATIAL), {TensorKey.END_IMG: UP}, TensorPool(), ModelPool())
    assert not hub.has_tensor(TensorKey.END_IMG)
    with pytest.raises(PinError, match=r"END_IMG, 901\.IMAGE, is not there"):
        hub.get_tensor(TensorKey.END_IMG)


def test_get_model_takes_the_nodes_own_key() -> None:
    models = ModelPool()
    source = ModelPoolKey(903, ModelKey.VAE_WAN2_1)  # a loader of another name, connected to the pin
    models.put(source, "vae")
    node_def = NodeDef(InferNodeType.VAE_ENCODE_SPATIAL, ModelKey.VAE_KL)
    assert make_hub(node_def, {ModelKey.VAE_KL: source}, TensorPool(), models).get_model() == "vae"


def test_missing_models_raise_key_errors_that_say_why() -> None:
    keyed, keyless = NodeDef(InferNodeType.VAE_DECODE, ModelKey.VAE_KL), NodeDef(InferNodeType.VAE_DECODE)
    with pytest.raises(KeyError, match="nothing is connected to model pin VAE_KL"):
        make_hub(keyed, {}, TensorPool(), ModelPool()).get_model()
    with pytest.raises(KeyError, match="has no model_key"):
        make_hub(keyless, {}, TensorPool(), ModelPool()).get_model()
    with pytest.raises(KeyError, match=r"no model 902\.T5TextEncoder is loaded"):
        pins: InputPins = {ModelKey.T5TextEncoder: LOADER}
        make_hub(keyed, pins, TensorPool(), ModelPool()).get_model(ModelKey.T5TextEncoder)


def test_reads_outside_the_declaration_raise() -> None:
    tensors = TensorPool()
    tensors.put(TensorPoolKey(7, TensorKey.NOISE), torch.ones(1))
    hub = make_hub(NodeDef(InferNodeType.VAE_ENCODE_SPATIAL), {}, tensors, ModelPool())
    for read in (hub.get_tensor, hub.has_tensor):
        with pytest.raises(PinError, match=r"declares no input NOISE; declared: .*START_IMG"):
            read(TensorKey.NOISE)
    with pytest.raises(PinError, match="declares no input FLUX1"):
        hub.get_model(ModelKey.FLUX1)


def test_writes_go_under_the_own_node_id_and_are_recorded() -> None:
    tensors, models = TensorPool(), ModelPool()
    node_def = NodeDef(InferNodeType.VAE_ENCODE_SPATIAL)
    hub = make_hub(node_def, {}, tensors, models)
    hub.put_tensor(TensorKey.LATENTS, torch.ones(1))
    hub.put_model(ModelKey.SD3, "net")
    latents, model = TensorPoolKey(node_def.node_id, TensorKey.LATENTS), ModelPoolKey(node_def.node_id, ModelKey.SD3)
    assert hub.written == {TensorKey.LATENTS: latents, ModelKey.SD3: model}
    assert tensors.keys() == (latents,)
    assert models.keys() == (model,)
    hub.discard_written()
    assert (hub.written, tensors.keys(), models.keys()) == ({}, (), ())


def test_undeclared_writes_raise() -> None:
    tensors, models = TensorPool(), ModelPool()
    hub = make_hub(NodeDef(InferNodeType.VAE_ENCODE_SPATIAL), {}, tensors, models)
    with pytest.raises(PinError, match="declares no output START_IMG; declared: LATENTS, SD3"):
        hub.put_tensor(TensorKey.START_IMG, torch.ones(1))
    with pytest.raises(PinError, match="declares no output VAE_KL"):
        hub.put_model(ModelKey.VAE_KL, "x")
    assert tensors.keys() == ()
    assert models.keys() == ()


def test_bindings_are_checked_when_it_is_made() -> None:
    node_def = NodeDef(InferNodeType.VAE_ENCODE_SPATIAL)
    with pytest.raises(PinError, match="declares no input NOISE"):
        make_hub(node_def, {TensorKey.NOISE: UP}, TensorPool(), ModelPool())
    with pytest.raises(PinTypeError, match="START_IMG cannot be bound"):
        make_hub(node_def, {TensorKey.START_IMG: LOADER}, TensorPool(), ModelPool())


def test_tensors_that_nobody_reads_are_not_broadcast() -> None:
    tensors = TensorPool()
    node_def = NodeDef(InferNodeType.VAE_ENCODE_SPATIAL)
    tensors.register(TensorPoolKey(node_def.node_id, TensorKey.LATENTS), 0)
    hub = make_hub(node_def, {}, tensors, ModelPool())
    hub.put_tensor(TensorKey.LATENTS, torch.ones(1))
    assert hub.written_tensors() == {}
