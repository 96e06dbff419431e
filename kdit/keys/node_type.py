"""The two enumerations of node types: forward computation, and everything that touches the outside."""

from enum import Enum


class InferNodeType(Enum):
    """Nodes that compute."""

    TEXT_ENCODE = "text_encode"
    VAE_COMPUTE_SHAPE = "vae_compute_shape"
    VAE_ENCODE_SPATIAL = "vae_encode_spatial"
    VAE_ENCODE_IMAGES = "vae_encode_images"
    IMAGE_ENCODE = "image_encode"
    VAE_DECODE = "vae_decode"
    GENERATE = "generate"
    VACE_PREPROCESS = "vace_preprocess"
    COMPOSITE = "composite"


class IONodeType(Enum):
    """Nodes that load, read, write, or bridge to the caller."""

    LOAD_MODEL = "load_model"
    SAVE_VIDEO = "save_video"
    SAVE_IMAGE = "save_image"
    READ_IMAGE = "read_image"
    FEED_TENSOR = "feed_tensor"
    FETCH_TENSOR = "fetch_tensor"
