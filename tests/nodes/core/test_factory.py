import sys
from importlib import import_module
from pathlib import Path

import pytest

from kdit.errors import RegistryError
from kdit.keys import InferNodeType, IONodeType, ModelKey, TensorKey
from kdit.nodes.core import factory
from kdit.nodes.core.factory import (
    InferNodeFactory,
    IONodeFactory,
    create_node,
    declared_inputs,
    declared_outputs,
    node_class,
)
from kdit.nodes.core.node_def import NodeDef
from tests.executor.fakes import FakeDecode, FakeGenerate, FakeLoader, FakeRead, install_fakes


def test_classes_are_found_by_type_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fakes(monkeypatch)
    assert InferNodeFactory.node_class(InferNodeType.GENERATE, ModelKey.FLUX1) is FakeGenerate
    assert isinstance(InferNodeFactory.create(InferNodeType.VAE_DECODE), FakeDecode)
    assert isinstance(create_node(NodeDef(InferNodeType.VAE_DECODE, ModelKey.VAE_KL)), FakeDecode)


def test_loaders_output_the_key_they_are_registered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fakes(monkeypatch)
    flux, vae = (IONodeFactory.create(IONodeType.LOAD_MODEL, key) for key in (ModelKey.FLUX1, ModelKey.VAE_KL))
    assert isinstance(flux, FakeLoader)
    assert flux.output_defs == [ModelKey.FLUX1]
    assert vae.output_defs == [ModelKey.VAE_KL]
    assert FakeLoader.output_defs == []


def test_a_second_class_for_one_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fakes(monkeypatch)
    with pytest.raises(RegistryError, match="VAE_DECODE for VAE_KL is registered twice: FakeDecode, FakeGenerate"):
        InferNodeFactory.register(InferNodeType.VAE_DECODE, [ModelKey.VAE_KL])(FakeGenerate)


def test_a_miss_lists_what_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fakes(monkeypatch)
    monkeypatch.setattr(factory, "_MODULES", {InferNodeType.GENERATE: ("kdit.nodes.core.node",)})
    with pytest.raises(KeyError, match=r"no node for GENERATE for SD3; registered: GENERATE for FLUX1$"):
        InferNodeFactory.create(InferNodeType.GENERATE, ModelKey.SD3)


def test_types_without_a_module_say_so() -> None:
    with pytest.raises(RegistryError, match="VACE_PREPROCESS has no node in this build; there are TEXT_ENCODE"):
        node_class(NodeDef(InferNodeType.VACE_PREPROCESS))


def test_the_module_is_imported_on_first_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_fakes(monkeypatch)
    (tmp_path / "lazy_fake_node.py").write_text(
        "from kdit.keys import IONodeType\n"
        "from kdit.nodes.core.factory import IONodeFactory\n"
        "from tests.executor.fakes import FakeRead\n"
        "IONodeFactory.register(IONodeType.SAVE_VIDEO, [None])(FakeRead)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(factory, "_MODULES", {IONodeType.SAVE_VIDEO: ("lazy_fake_node",)})
    assert "lazy_fake_node" not in sys.modules
    assert IONodeFactory.node_class(IONodeType.SAVE_VIDEO) is FakeRead
    del sys.modules["lazy_fake_node"]


def test_declared_pins_are_tensors_and_models(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fakes(monkeypatch)
    encode = NodeDef(InferNodeType.TEXT_ENCODE, ModelKey.T5TextEncoder, (ModelKey.CLIPTextEncoder,))
    assert declared_inputs(encode) == (ModelKey.T5TextEncoder, ModelKey.CLIPTextEncoder)
    assert declared_outputs(encode) == (TensorKey.POSITIVE, TensorKey.NEGATIVE)
    load = NodeDef(IONodeType.LOAD_MODEL, ModelKey.SD3)
    assert declared_inputs(load) == ()  # a loader's key is its output
    assert declared_outputs(load) == (ModelKey.SD3,)


@pytest.mark.parametrize("node_type", factory._MODULES)
def test_every_module_of_the_table_registers_its_type(node_type: InferNodeType | IONodeType) -> None:
    for module in factory._MODULES[node_type]:
        import_module(module)
    registered = {**InferNodeFactory._classes, **IONodeFactory._classes}
    assert node_type in {entry[0] for entry in registered}
