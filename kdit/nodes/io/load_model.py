"""LOAD_MODEL: puts a network, an encoder or an autoencoder on its model pin. One class per kind of model."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import cast

import torch

from kdit.config import DTYPES, ExecuteConfig
from kdit.errors import CheckpointError, ConfigError
from kdit.keys import IONodeType, ModelKey, ModelKind, family_of_model
from kdit.models.image_encoder import load_image_encoder
from kdit.models.model_pool import LoadedModel
from kdit.models.single_file.file_component import open_component
from kdit.models.text_encoder import load_text_encoder
from kdit.models.vae import load_vae
from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.loading import load_network
from kdit.nodes.core.factory import IONodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import IONode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_hub import PinHub
from kdit.ops.half_precision import widen_products
from kdit.ops.opset import OpSet


@dataclass(frozen=True)
class LoadModelSettings:
    """The node's metadata."""

    path: str  # folder of the component, or the file that holds it
    variant: str | None = None  # of the weight files of a folder
    part: str | None = None  # of a file: which of its models, as what component, with what config
    component: str | None = None
    config: dict[str, object] | None = None
    dtype: str = "float32"
    tokenizer_path: str | None = None  # of a text encoder; of an image encoder its processor

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"LOAD_MODEL: dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def open(self) -> ComponentFolder:
        """The component, in a folder or a file."""
        return open_component(
            self.path, variant=self.variant, part=self.part, component=self.component, config=self.config
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch names it."""
        return cast(torch.dtype, getattr(torch, self.dtype))


class ModelLoader(IONode):
    """Reads the metadata, loads onto the compute device, writes the one output that the factory filled in."""

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Load the model; raises CheckpointError before anything is allocated if its files cannot be used."""
        (key,) = self.output_defs
        assert isinstance(key, ModelKey) and context.device is not None
        settings = read_metadata(LoadModelSettings, context)
        config = context.execute_config or ExecuteConfig()
        pins.put_model(key, self.load(key, settings, config, context.device.compute_device))

    @abstractmethod
    def load(
        self, key: ModelKey, settings: LoadModelSettings, config: ExecuteConfig, device: torch.device
    ) -> LoadedModel:
        """The loaded model."""


@IONodeFactory.register(IONodeType.LOAD_MODEL, ModelKey.of_kind(ModelKind.NETWORK))
class NetworkLoader(ModelLoader):
    """Loads a diffusion transformer of ours."""

    def load(
        self, key: ModelKey, settings: LoadModelSettings, config: ExecuteConfig, device: torch.device
    ) -> LoadedModel:
        """A Network, of a class that belongs to the key's family."""
        _refuse_tokenizer(key, settings)
        component = settings.open()
        expected = family_of_model(key).network_classes
        if component.class_name not in expected:
            raise CheckpointError(
                f"{component.config_path}: _class_name is {component.class_name!r},"
                f" expected {' or '.join(expected)} for {key.name}"
            )
        ops = OpSet(batch_invariant=config.batch_invariant)
        streamed = config.modulation == "table"  # what the tables are made of is then not needed in the loop
        return load_network(component, dtype=settings.torch_dtype, device=device, ops=ops, streamed=streamed)


@IONodeFactory.register(IONodeType.LOAD_MODEL, ModelKey.of_kind(ModelKind.TEXT_ENCODER))
class TextEncoderLoader(ModelLoader):
    """Loads a text encoder and its tokenizer."""

    def load(
        self, key: ModelKey, settings: LoadModelSettings, config: ExecuteConfig, device: torch.device
    ) -> LoadedModel:
        """A TextEncoder."""
        if settings.tokenizer_path is None:
            raise ConfigError(f"LOAD_MODEL {key.name}: a text encoder needs metadata 'tokenizer_path'")
        encoder = load_text_encoder(settings.open(), settings.tokenizer_path, dtype=settings.torch_dtype, device=device)
        widen_products(encoder.model)
        return encoder


@IONodeFactory.register(IONodeType.LOAD_MODEL, ModelKey.of_kind(ModelKind.IMAGE_ENCODER))
class ImageEncoderLoader(ModelLoader):
    """Loads an image encoder and its processor."""

    def load(
        self, key: ModelKey, settings: LoadModelSettings, config: ExecuteConfig, device: torch.device
    ) -> LoadedModel:
        """An ImageEncoder."""
        if settings.tokenizer_path is None:
            raise ConfigError(f"LOAD_MODEL {key.name}: an image encoder needs its processor, metadata 'tokenizer_path'")
        encoder = load_image_encoder(settings.path, settings.tokenizer_path, dtype=settings.torch_dtype, device=device)
        widen_products(encoder.model)
        return encoder


@IONodeFactory.register(IONodeType.LOAD_MODEL, ModelKey.of_kind(ModelKind.VAE))
class VaeLoader(ModelLoader):
    """Loads an autoencoder."""

    def load(
        self, key: ModelKey, settings: LoadModelSettings, config: ExecuteConfig, device: torch.device
    ) -> LoadedModel:
        """An autoencoder of diffusers."""
        _refuse_tokenizer(key, settings)
        vae = load_vae(settings.open(), dtype=settings.torch_dtype, device=device)
        widen_products(vae)
        return vae


def _refuse_tokenizer(key: ModelKey, settings: LoadModelSettings) -> None:
    if settings.tokenizer_path is not None:
        raise ConfigError(f"LOAD_MODEL {key.name}: only encoders take 'tokenizer_path'")
