"""ModelKey: the identity of a loadable model."""

from __future__ import annotations

from enum import Enum


class ModelKind(Enum):
    """What a model is for; loaders and nodes are registered for a whole kind."""

    NETWORK = "network"
    TEXT_ENCODER = "text_encoder"
    IMAGE_ENCODER = "image_encoder"
    VAE = "vae"


class ModelKey(Enum):
    """Names one model role. Encoders and autoencoders may serve several families."""

    FLUX1 = ("flux1", ModelKind.NETWORK)
    FLUX1_FILL = ("flux1-fill", ModelKind.NETWORK)
    FLUX1_CONTROL = ("flux1-control", ModelKind.NETWORK)
    FLUX1_KONTEXT = ("flux1-kontext", ModelKind.NETWORK)
    SD3 = ("sd3", ModelKind.NETWORK)
    Wan2_1_T2V = ("wan2.1-t2v", ModelKind.NETWORK)
    Wan2_1_I2V = ("wan2.1-i2v", ModelKind.NETWORK)
    Wan2_2_T2V_14B = ("wan2.2-t2v-14b", ModelKind.NETWORK)
    Wan2_2_T2V_14B_LOW = ("wan2.2-t2v-14b-low", ModelKind.NETWORK)  # the expert of the low-noise steps
    Wan2_2_I2V_14B = ("wan2.2-i2v-14b", ModelKind.NETWORK)
    Wan2_2_I2V_14B_LOW = ("wan2.2-i2v-14b-low", ModelKind.NETWORK)
    Wan2_2_TI2V_5B = ("wan2.2-ti2v-5b", ModelKind.NETWORK)

    CLIPTextEncoder = ("clip-text", ModelKind.TEXT_ENCODER)
    CLIPTextEncoder2 = ("clip-text-2", ModelKind.TEXT_ENCODER)
    T5TextEncoder = ("t5-text", ModelKind.TEXT_ENCODER)
    UMT5TextEncoder = ("umt5-text", ModelKind.TEXT_ENCODER)

    CLIPImageEncoder = ("clip-image", ModelKind.IMAGE_ENCODER)

    VAE_KL = ("vae-kl", ModelKind.VAE)
    VAE_WAN2_1 = ("vae-wan2.1", ModelKind.VAE)
    VAE_WAN2_2 = ("vae-wan2.2", ModelKind.VAE)

    def __init__(self, label: str, kind: ModelKind) -> None:
        self.label = label
        self.kind = kind

    @classmethod
    def of_kind(cls, kind: ModelKind) -> tuple[ModelKey, ...]:
        """All keys of one kind, in declaration order."""
        return tuple(key for key in cls if key.kind is kind)
