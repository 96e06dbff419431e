"""The encode and decode nodes against the libraries they call, each run through a real executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

from kdit import RuntimeConfig
from kdit.engine.engine import Engine
from kdit.errors import InputError, PinError
from kdit.keys import InferNodeType, IONodeType, ModelKey, RunId, TensorKey
from kdit.models.model_pool_key import ModelPoolKey
from kdit.models.text_encoder import TextEncoder, load_text_encoder
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import InputPins
from kdit.nodes.infer.text_encode import EncoderCall
from kdit.tensor.tensor_pool_key import TensorPoolKey
from kdit.tensor.tensor_value import TensorData

RUN = RunId("test")


@pytest.fixture(scope="module")
def folder(reference_family: Callable[[str], Path]) -> Path:
    return reference_family("flux_dev") / "model"


@pytest.fixture(scope="module")
def vae(folder: Path) -> AutoencoderKL:
    return AutoencoderKL.from_pretrained(folder / "vae").requires_grad_(False)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine.single("cpu")
    yield engine
    engine.end_run(RUN)
    assert engine.tensor_keys() == ()


def run(
    engine: Engine,
    node_type: InferNodeType,
    models: dict[ModelKey, object],
    inputs: dict[TensorKey, TensorData],
    *,
    metadata: dict[str, object] | None = None,
    runtime: RuntimeConfig | None = None,
) -> dict[TensorKey, TensorData]:
    """One node with its models and inputs put where their producers would have put them."""
    pins: InputPins = {}
    for key, model in models.items():
        loader = NodeDef(IONodeType.LOAD_MODEL, key)
        engine.executors[0]._model_pool.put(ModelPoolKey(loader.node_id, key), model)
        pins[key] = ModelPoolKey(loader.node_id, key)
    for tensor_key, data in inputs.items():
        source = TensorPoolKey(NodeDef(IONodeType.FEED_TENSOR).node_id, tensor_key)
        engine.put_tensors({source: data}, run=RUN)
        pins[tensor_key] = source
    own, *others = models
    node_def = NodeDef(node_type, own, tuple(others))
    context = NodeContext(runtime_config=runtime, metadata=metadata or {})
    written = engine.run_node(node_def, pins, context, run=RUN)
    return {pin: engine.get_tensor(key, run=RUN) for pin, key in written.items()}  # type: ignore[misc,arg-type]


def picture(width: int, height: int, seed: int = 0) -> Tensor:
    levels = np.random.default_rng(seed).integers(0, 256, (1, height, width, 3), dtype=np.uint8)
    return torch.from_numpy(levels).float() / 255


# ---- TEXT_ENCODE


@pytest.fixture(scope="module")
def encoders(folder: Path) -> dict[ModelKey, object]:
    def load(model: str, tokenizer: str) -> TextEncoder:
        return load_text_encoder(folder / model, folder / tokenizer, dtype=torch.float32, device="cpu")

    return {
        ModelKey.T5TextEncoder: load("text_encoder_2", "tokenizer_2"),
        ModelKey.CLIPTextEncoder: load("text_encoder", "tokenizer"),
    }


def calls(texts: tuple[str, ...], negative: tuple[str, ...] | None) -> dict[str, object]:
    t5 = EncoderCall(
        model=ModelKey.T5TextEncoder,
        texts=texts,
        negative_texts=negative,
        max_length=20,
        output="last_hidden_state",
    )
    clip = EncoderCall(
        model=ModelKey.CLIPTextEncoder, texts=texts, negative_texts=negative, max_length=77, output="pooler_output"
    )
    return {"calls": (t5, clip)}


def test_text_is_encoded_as_transformers_encodes_it(engine: Engine, encoders: dict[ModelKey, object]) -> None:
    texts = ("a red fox", "", "a red fox")
    out = run(engine, InferNodeType.TEXT_ENCODE, encoders, {}, metadata=calls(texts, ("blurry",) * 3))
    for key, expected_texts in ((TensorKey.POSITIVE, texts), (TensorKey.NEGATIVE, ("blurry",) * 3)):
        t5, clip = out[key]
        for encoder, length, got, name in (
            (encoders[ModelKey.T5TextEncoder], 20, t5, "last_hidden_state"),
            (encoders[ModelKey.CLIPTextEncoder], 77, clip, "pooler_output"),
        ):
            assert isinstance(encoder, TextEncoder)
            ids = encoder.tokenizer(
                list(expected_texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
            )["input_ids"]
            with torch.inference_mode():
                torch.testing.assert_close(got, getattr(encoder.model(ids), name), rtol=1e-5, atol=1e-5)
        assert torch.equal(t5[0], t5[2])


def test_without_a_guidance_branch_the_negative_is_empty(engine: Engine, encoders: dict[ModelKey, object]) -> None:
    out = run(engine, InferNodeType.TEXT_ENCODE, encoders, {}, metadata=calls(("a",), None))
    assert out[TensorKey.NEGATIVE] == [] and len(out[TensorKey.POSITIVE]) == 2


def test_a_text_does_not_depend_on_its_neighbours(engine: Engine, encoders: dict[ModelKey, object]) -> None:
    both = run(engine, InferNodeType.TEXT_ENCODE, encoders, {}, metadata=calls(("a red fox", "word " * 40), None))
    alone = run(engine, InferNodeType.TEXT_ENCODE, encoders, {}, metadata=calls(("a red fox",), None))
    for joint, single in zip(both[TensorKey.POSITIVE], alone[TensorKey.POSITIVE], strict=True):
        assert torch.equal(joint[:1], single)


def test_a_missing_encoder_is_named(engine: Engine, encoders: dict[ModelKey, object]) -> None:
    only_t5 = {ModelKey.T5TextEncoder: encoders[ModelKey.T5TextEncoder]}
    with pytest.raises(PinError, match="CLIPTextEncoder"):
        run(engine, InferNodeType.TEXT_ENCODE, only_t5, {}, metadata=calls(("a",), None))


# ---- the autoencoder


def test_compute_shape_follows_the_autoencoder(engine: Engine, vae: AutoencoderKL) -> None:
    def shape(size: tuple[int, int]) -> Tensor:
        out = run(
            engine,
            InferNodeType.VAE_COMPUTE_SHAPE,
            {ModelKey.VAE_KL: vae},
            {},
            metadata={"num_samples": 3},
            runtime=RuntimeConfig(size=size),
        )[TensorKey.BASE_LATENT]
        assert isinstance(out, Tensor)
        return out

    assert shape((40, 64)).shape == (3, 4, 8, 5) and not shape((8, 8)).any()
    with pytest.raises(InputError, match="20x64 is not a multiple of the autoencoder's 8 pixels"):
        shape((20, 64))


def encode(engine: Engine, vae: AutoencoderKL, images: TensorData, seeds: tuple[int, ...] | None) -> Tensor:
    out = run(
        engine,
        InferNodeType.VAE_ENCODE_SPATIAL,
        {ModelKey.VAE_KL: vae},
        {TensorKey.IMAGE: images},
        metadata={"seeds": seeds},
        runtime=RuntimeConfig(size=(32, 48)),
    )[TensorKey.BASE_LATENT]
    assert isinstance(out, Tensor)
    return out


def expected_latents(vae: AutoencoderKL, image: Tensor, seed: int | None) -> Tensor:
    levels = (image[0] * 255).round().to(torch.uint8).numpy()
    pixels = VaeImageProcessor(vae_scale_factor=8).preprocess(Image.fromarray(levels), height=48, width=32)
    posterior = vae.encode(pixels.contiguous()).latent_dist
    latents = posterior.mode() if seed is None else posterior.sample(torch.Generator().manual_seed(seed))
    return (latents - vae.config.shift_factor) * vae.config.scaling_factor


@pytest.mark.parametrize("size", [(32, 48), (50, 33)])
def test_a_picture_is_resized_and_encoded_as_diffusers_does(
    engine: Engine, vae: AutoencoderKL, size: tuple[int, int]
) -> None:
    image = picture(*size)
    torch.testing.assert_close(encode(engine, vae, image, None), expected_latents(vae, image, None))
    sampled = encode(engine, vae, image, (5, 6))  # one picture for two samples, each with its own draw
    for i, seed in enumerate((5, 6)):
        torch.testing.assert_close(sampled[i : i + 1], expected_latents(vae, image, seed))


def test_pictures_and_samples_must_match(engine: Engine, vae: AutoencoderKL) -> None:
    pictures = torch.cat([picture(32, 48), picture(32, 48, 1)])
    assert encode(engine, vae, pictures, (1, 2)).shape == (2, 4, 6, 4)
    with pytest.raises(InputError, match="2 images for 3 samples"):
        encode(engine, vae, pictures, (1, 2, 3))
    with pytest.raises(InputError, match=r"must be \[B, H, W, 3\], got \(1, 3, 48, 32\)"):
        encode(engine, vae, torch.zeros(1, 3, 48, 32), None)


def test_reference_pictures_keep_their_own_sizes(engine: Engine, vae: AutoencoderKL) -> None:
    images = [picture(32, 48), picture(52, 20, 1)]
    out = run(engine, InferNodeType.VAE_ENCODE_IMAGES, {ModelKey.VAE_KL: vae}, {TensorKey.IMAGE: images})
    first, second = out[TensorKey.AUX_LATENT]
    torch.testing.assert_close(first, expected_latents(vae, images[0], None))
    assert second.shape == (1, 4, 2, 6)  # 20 pixels are cut to the grid of 8


def test_latents_are_decoded_as_diffusers_does(engine: Engine, vae: AutoencoderKL) -> None:
    latents = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(0))
    out = run(engine, InferNodeType.VAE_DECODE, {ModelKey.VAE_KL: vae}, {TensorKey.LATENTS: latents})
    decoded = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    expected = VaeImageProcessor().postprocess(decoded, output_type="np")
    torch.testing.assert_close(out[TensorKey.IMAGE], torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"LATENTS must be \[B, 4, h, w\], got \(2, 5, 3, 5\)"):
        run(engine, InferNodeType.VAE_DECODE, {ModelKey.VAE_KL: vae}, {TensorKey.LATENTS: torch.zeros(2, 5, 3, 5)})


@pytest.mark.parametrize(
    ("node_type", "metadata"),
    [
        (InferNodeType.VAE_DECODE, {}),
        (InferNodeType.VAE_ENCODE_SPATIAL, {"seeds": None}),
        (InferNodeType.VAE_ENCODE_IMAGES, {}),
    ],
)
def test_an_unconnected_input_is_named(
    engine: Engine, vae: AutoencoderKL, node_type: InferNodeType, metadata: dict[str, object]
) -> None:
    with pytest.raises(InputError, match=f"{node_type.name} .*(IMAGE|LATENTS)"):
        run(engine, node_type, {ModelKey.VAE_KL: vae}, {}, metadata=metadata, runtime=RuntimeConfig(size=(32, 48)))
