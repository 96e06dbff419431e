"""NodeDef, NodeRef, PinRef, dispatch policies."""

import copy
import pickle

import pytest

from kdit.config import ParallelConfig
from kdit.errors import GraphError
from kdit.keys import InferNodeType, IONodeType, ModelKey, TensorKey
from kdit.nodes.core.dispatch_policy import NodeDispatchPolicy, dispatch_policy
from kdit.nodes.core.node_def import NodeDef, NodeRef
from kdit.nodes.core.pin_def import PinRef


def test_node_ids_are_given_and_unique() -> None:
    first, second = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1), NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    assert 0 < first.node_id < second.node_id
    assert first != second
    with pytest.raises(TypeError):
        NodeDef(InferNodeType.GENERATE, node_id=7)  # type: ignore[call-arg]


def test_node_def_keeps_its_id_when_pickled() -> None:
    node_def = NodeDef(InferNodeType.TEXT_ENCODE, ModelKey.CLIPTextEncoder, (ModelKey.T5TextEncoder,))
    assert pickle.loads(pickle.dumps(node_def)) == node_def
    assert {node_def: 1}[copy.deepcopy(node_def)] == 1


def test_is_io_follows_the_type() -> None:
    assert NodeDef(IONodeType.READ_IMAGE).is_io
    assert not NodeDef(InferNodeType.VAE_DECODE).is_io


def test_a_model_named_twice_is_refused() -> None:
    with pytest.raises(GraphError, match="each model may be named once"):
        NodeDef(InferNodeType.TEXT_ENCODE, ModelKey.CLIPTextEncoder, (ModelKey.CLIPTextEncoder,))


def test_node_ref_gives_pins_by_name() -> None:
    ref = NodeRef(NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1))
    assert PinRef(ref.node_id, TensorKey.BASE_LATENT) == ref.BASE_LATENT
    assert PinRef(ref.node_id, ModelKey.Wan2_2_I2V_14B) == ref.Wan2_2_I2V_14B
    assert ref.pin(TensorKey.NOISE) == ref.NOISE


def test_a_misspelt_pin_lists_near_names() -> None:
    ref = NodeRef(NodeDef(InferNodeType.GENERATE))
    with pytest.raises(AttributeError, match=r"'LATENT'; near: .*LATENTS"):
        _ = ref.LATENT
    with pytest.raises(AttributeError, match=r"near: .*NEGATIVE"):
        _ = ref.negatve


def test_shift_calls_the_connector_with_both_pins() -> None:
    calls: list[tuple[PinRef, PinRef]] = []
    ref = NodeRef(NodeDef(IONodeType.READ_IMAGE), lambda src, dst: calls.append((src, dst)))
    other = NodeRef(NodeDef(InferNodeType.VAE_ENCODE_SPATIAL))
    ref.IMAGE >> other.START_IMG
    assert calls == [(ref.IMAGE, other.START_IMG)]
    with pytest.raises(GraphError, match="belongs to no builder"):
        other.BASE_LATENT >> ref.IMAGE


def test_pin_refs_compare_without_their_connector() -> None:
    assert PinRef(1, TensorKey.IMAGE, lambda src, dst: None) == PinRef(1, TensorKey.IMAGE)


ALL, BCAST, R0 = NodeDispatchPolicy.ALL_ALL_ALL, NodeDispatchPolicy.R0_R0_BCAST, NodeDispatchPolicy.ALL_R0_R0


def test_every_node_type_has_its_policy() -> None:
    expected: dict[InferNodeType | IONodeType, NodeDispatchPolicy] = {
        IONodeType.LOAD_MODEL: ALL,
        IONodeType.FEED_TENSOR: ALL,
        InferNodeType.GENERATE: ALL,
        IONodeType.READ_IMAGE: BCAST,
        InferNodeType.TEXT_ENCODE: BCAST,
        InferNodeType.IMAGE_ENCODE: BCAST,
        InferNodeType.VAE_COMPUTE_SHAPE: BCAST,
        InferNodeType.VAE_ENCODE_SPATIAL: BCAST,
        InferNodeType.VAE_ENCODE_IMAGES: BCAST,
        InferNodeType.VACE_PREPROCESS: BCAST,
        InferNodeType.VAE_DECODE: R0,
        InferNodeType.COMPOSITE: R0,
        IONodeType.SAVE_VIDEO: R0,
        IONodeType.SAVE_IMAGE: R0,
        IONodeType.FETCH_TENSOR: R0,
    }
    types: list[InferNodeType | IONodeType] = [*InferNodeType, *IONodeType]
    assert {item: dispatch_policy(NodeDef(item), ParallelConfig()) for item in types} == expected


@pytest.mark.parametrize(
    ("node_type", "config", "policy"),
    [
        (InferNodeType.TEXT_ENCODE, ParallelConfig(tp=2, text_encoder_tp=2), ALL),
        (InferNodeType.TEXT_ENCODE, ParallelConfig(tp=2, vae=2), BCAST),
        (InferNodeType.VAE_DECODE, ParallelConfig(tp=2, vae=2), ALL),
        (InferNodeType.VAE_ENCODE_SPATIAL, ParallelConfig(tp=2, vae=2), ALL),
        (InferNodeType.VAE_ENCODE_IMAGES, ParallelConfig(tp=2, vae=2), ALL),
        (InferNodeType.VAE_DECODE, ParallelConfig(tp=2, text_encoder_tp=2), R0),
    ],
)
def test_shared_work_runs_on_all_ranks(
    node_type: InferNodeType, config: ParallelConfig, policy: NodeDispatchPolicy
) -> None:
    assert dispatch_policy(NodeDef(node_type), config) is policy
