"""The factories: node type and model key -> node class, and the lazy table of the modules that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import ClassVar, TypeVar

from kdit.errors import RegistryError
from kdit.keys import InferNodeType, IONodeType, ModelKey
from kdit.nodes.core.node import InferNode, IONode, Node
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import PinDef

NodeType = InferNodeType | IONodeType
NodeT = TypeVar("NodeT", bound=Node)
InferNodeT = TypeVar("InferNodeT", bound=InferNode)
IONodeT = TypeVar("IONodeT", bound=IONode)
Registered = dict[tuple[NodeType, ModelKey | None], type[Node]]

# imported on the first use of the type; a type that is not here has no node in this build
_VIDEO_VAE = "kdit.nodes.infer.video_vae"
_MODULES: dict[NodeType, tuple[str, ...]] = {
    InferNodeType.TEXT_ENCODE: ("kdit.nodes.infer.text_encode",),
    InferNodeType.IMAGE_ENCODE: ("kdit.nodes.infer.image_encode",),
    InferNodeType.VAE_COMPUTE_SHAPE: ("kdit.nodes.infer.vae_compute_shape", _VIDEO_VAE),
    InferNodeType.VAE_ENCODE_SPATIAL: ("kdit.nodes.infer.vae_encode_spatial", _VIDEO_VAE),
    InferNodeType.VAE_ENCODE_IMAGES: ("kdit.nodes.infer.vae_encode_images",),
    InferNodeType.VAE_DECODE: ("kdit.nodes.infer.vae_decode", _VIDEO_VAE),
    InferNodeType.COMPOSITE: ("kdit.nodes.infer.composite",),
    InferNodeType.GENERATE: ("kdit.nodes.infer.generate",),
    IONodeType.LOAD_MODEL: ("kdit.nodes.io.load_model",),
    IONodeType.READ_IMAGE: ("kdit.nodes.io.read_image",),
    IONodeType.SAVE_IMAGE: ("kdit.nodes.io.save_image",),
    IONodeType.SAVE_VIDEO: ("kdit.nodes.io.save_video",),
    IONodeType.FEED_TENSOR: ("kdit.nodes.io.feed_tensor",),
    IONodeType.FETCH_TENSOR: ("kdit.nodes.io.fetch_tensor",),
}


def _name(node_type: NodeType, model_key: ModelKey | None) -> str:
    return f"{node_type.name} for {model_key.name if model_key else 'no model'}"


def _register(
    classes: Registered, node_type: NodeType, keys: Sequence[ModelKey | None]
) -> Callable[[type[NodeT]], type[NodeT]]:
    def decorate(node_class: type[NodeT]) -> type[NodeT]:
        for key in keys:
            if (node_type, key) in classes:
                taken = classes[node_type, key].__name__
                raise RegistryError(f"{_name(node_type, key)} is registered twice: {taken}, {node_class.__name__}")
            found: type[Node] = node_class
            if node_type is IONodeType.LOAD_MODEL:
                # one loader class serves many keys; each key's own output is filled in here
                found = type(node_class.__name__, (node_class,), {"output_defs": [key], "__doc__": node_class.__doc__})
            classes[node_type, key] = found
        return node_class

    return decorate


def _lookup(classes: Registered, node_type: NodeType, model_key: ModelKey | None) -> type[Node]:
    if (node_type, model_key) not in classes and node_type in _MODULES:
        for module in _MODULES[node_type]:
            import_module(module)
    if (node_type, model_key) in classes:
        return classes[node_type, model_key]
    if node_type not in _MODULES:
        present = ", ".join(entry.name for entry in _MODULES)
        raise RegistryError(f"{node_type.name} has no node in this build; there are {present}")
    known = [_name(*entry) for entry in classes if entry[0] is node_type]
    raise RegistryError(f"no node for {_name(node_type, model_key)}; registered: {', '.join(known) or 'none'}")


class InferNodeFactory:
    """Makes InferNodes; ``@InferNodeFactory.register(node_type, [model keys])`` adds a class."""

    _classes: ClassVar[Registered] = {}

    @classmethod
    def register(
        cls, node_type: InferNodeType, keys: Sequence[ModelKey | None]
    ) -> Callable[[type[InferNodeT]], type[InferNodeT]]:
        """Register the decorated class for ``node_type`` with each of ``keys`` (None: without a model)."""
        return _register(cls._classes, node_type, keys)

    @classmethod
    def node_class(cls, node_type: InferNodeType, model_key: ModelKey | None = None) -> type[InferNode]:
        """The registered class; raises RegistryError listing what there is."""
        found = _lookup(cls._classes, node_type, model_key)
        assert issubclass(found, InferNode), found
        return found

    @classmethod
    def create(cls, node_type: InferNodeType, model_key: ModelKey | None = None) -> InferNode:
        """A new node of the registered class."""
        return cls.node_class(node_type, model_key)()


class IONodeFactory:
    """Makes IONodes; of LOAD_MODEL every registered key becomes the output of its class."""

    _classes: ClassVar[Registered] = {}

    @classmethod
    def register(
        cls, node_type: IONodeType, keys: Sequence[ModelKey | None]
    ) -> Callable[[type[IONodeT]], type[IONodeT]]:
        """Register the decorated class for ``node_type`` with each of ``keys`` (None: without a model)."""
        return _register(cls._classes, node_type, keys)

    @classmethod
    def node_class(cls, node_type: IONodeType, model_key: ModelKey | None = None) -> type[IONode]:
        """The registered class; raises RegistryError listing what there is."""
        found = _lookup(cls._classes, node_type, model_key)
        assert issubclass(found, IONode), found
        return found

    @classmethod
    def create(cls, node_type: IONodeType, model_key: ModelKey | None = None) -> IONode:
        """A new node of the registered class."""
        return cls.node_class(node_type, model_key)()


def node_class(node_def: NodeDef) -> type[Node]:
    """The class that runs ``node_def``."""
    if isinstance(node_def.node_type, IONodeType):
        return IONodeFactory.node_class(node_def.node_type, node_def.model_key)
    return InferNodeFactory.node_class(node_def.node_type, node_def.model_key)


def create_node(node_def: NodeDef) -> Node:
    """A new node that runs ``node_def``."""
    return node_class(node_def)()


def model_inputs(node_def: NodeDef) -> tuple[ModelKey, ...]:
    """Model pins that must be connected: an infer node's own model, and the further ``models``."""
    own = () if node_def.is_io or node_def.model_key is None else (node_def.model_key,)
    return own + node_def.models


def declared_inputs(node_def: NodeDef) -> tuple[PinDef, ...]:
    """All input pins of a node: the tensors of its class and its models."""
    return (*node_class(node_def).input_defs, *model_inputs(node_def))


def declared_outputs(node_def: NodeDef) -> tuple[PinDef, ...]:
    """All output pins of a node."""
    return tuple(node_class(node_def).output_defs)
