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
from kdit.config.runtime_config import Fit
from kdit.engine.engine import Engine
from kdit.errors import InputError, PinError
from kdit.keys import InferNodeType, IONodeType, ModelKey, RunId, TensorKey
from kdit.media.image_fit import fit_image
from kdit.models.model_pool_key import ModelPoolKey
from kdit.models.text_encoder import TextEncoder, load_text_encoder
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import InputPins
from kdit.nodes.infer.pixels import to_vae_pixels
from kdit.nodes.infer.text_encode import EncoderCall
from kdit.nodes.infer.vae_encode_images import reference_size
from kdit.pipelines.context_builders.flux import KONTEXT_SIZES
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
    node_def = NodeDef(node_type, next(iter(models), None), tuple(models)[1:])
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
        outputs=("last_hidden_state",),
    )
    clip = EncoderCall(
        model=ModelKey.CLIPTextEncoder, texts=texts, negative_texts=negative, max_length=77, outputs=("pooler_output",)
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


def encode(
    engine: Engine, vae: AutoencoderKL, images: TensorData, seeds: tuple[int, ...], fit: Fit = "reject", **more: object
) -> Tensor:
    out = run(
        engine,
        InferNodeType.VAE_ENCODE_SPATIAL,
        {ModelKey.VAE_KL: vae},
        {TensorKey.IMAGE: images},
        metadata={"seeds": seeds, **more},
        runtime=RuntimeConfig(size=(32, 48), fit=fit),
    )[TensorKey.BASE_LATENT]
    assert isinstance(out, Tensor)
    return out


def expected_pixels(image: Tensor) -> Tensor:
    levels = (image[0] * 255).round().to(torch.uint8).numpy()
    pixels: Tensor = VaeImageProcessor(vae_scale_factor=8).preprocess(Image.fromarray(levels), height=48, width=32)
    return pixels


def scaled(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    return (latents - vae.config.shift_factor) * vae.config.scaling_factor


def expected_latents(vae: AutoencoderKL, image: Tensor, seed: int | None) -> Tensor:
    posterior = vae.encode(expected_pixels(image).contiguous()).latent_dist
    return scaled(vae, posterior.mode() if seed is None else posterior.sample(torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("size", [(32, 48), (50, 33)])
def test_a_picture_is_resized_and_encoded_as_diffusers_does(
    engine: Engine, vae: AutoencoderKL, size: tuple[int, int]
) -> None:
    image = picture(*size)
    assert torch.equal(to_vae_pixels(image[0], (32, 48)), expected_pixels(image))
    modes = encode(engine, vae, image, (5, 6), sampled=False)
    torch.testing.assert_close(modes, expected_latents(vae, image, None).expand(2, -1, -1, -1))
    sampled = encode(engine, vae, image, (5, 6))  # one picture for two samples, each with its own draw
    for i, seed in enumerate((5, 6)):
        torch.testing.assert_close(sampled[i : i + 1], expected_latents(vae, image, seed))
        assert torch.equal(sampled[i : i + 1], encode(engine, vae, image, (seed,)))


def test_a_picture_of_another_shape_is_cut_or_widened_if_asked_for(engine: Engine, vae: AutoencoderKL) -> None:
    image = picture(64, 48)
    for fit in ("pad", "crop"):
        fitted = fit_image(image[0], (32, 48), fit)[None]  # type: ignore[arg-type]
        got = encode(engine, vae, image, (5,), fit=fit)  # type: ignore[arg-type]
        assert torch.equal(got, encode(engine, vae, fitted, (5,)))
        assert not torch.equal(got, encode(engine, vae, image, (5,)))


def test_pictures_and_samples_must_match(engine: Engine, vae: AutoencoderKL) -> None:
    pictures = torch.cat([picture(32, 48), picture(32, 48, 1)])
    assert encode(engine, vae, pictures, (1, 2)).shape == (2, 4, 6, 4)
    with pytest.raises(InputError, match="2 images for 3 samples"):
        encode(engine, vae, pictures, (1, 2, 3))
    with pytest.raises(InputError, match=r"must be \[B, H, W, 3\], got \(1, 3, 48, 32\)"):
        encode(engine, vae, torch.zeros(1, 3, 48, 32), (1,))


def encode_images(
    engine: Engine, vae: AutoencoderKL, inputs: dict[TensorKey, TensorData], **metadata: object
) -> TensorData:
    return run(
        engine,
        InferNodeType.VAE_ENCODE_IMAGES,
        {ModelKey.VAE_KL: vae},
        inputs,
        metadata=metadata,
        runtime=RuntimeConfig(size=(32, 48)),
    )[TensorKey.AUX_LATENT]


def test_reference_pictures_keep_their_own_sizes(engine: Engine, vae: AutoencoderKL) -> None:
    images = [picture(32, 48), picture(52, 20, 1)]
    first, second = encode_images(engine, vae, {TensorKey.IMAGE: images})
    torch.testing.assert_close(first, expected_latents(vae, images[0], None))
    assert second.shape == (1, 4, 2, 6)  # 20 pixels are cut to the grid of 8
    first, second = encode_images(engine, vae, {TensorKey.IMAGE: images}, multiple=16)
    assert second.shape == (1, 4, 2, 6)
    first, second = encode_images(engine, vae, {TensorKey.IMAGE: images}, preferred_sizes=((24, 32), (64, 32)))
    assert (first.shape, second.shape) == ((1, 4, 4, 3), (1, 4, 4, 8))
    with pytest.raises(InputError, match="at least 32 pixels a side, got 52x20"):
        encode_images(engine, vae, {TensorKey.IMAGE: images}, multiple=32)


def test_references_are_resized_to_the_size_that_diffusers_prefers() -> None:
    """The nearest shape, not the nearest size; of two equally near, the smaller."""
    assert [reference_size(own, KONTEXT_SIZES, 16) for own in ((500, 500), (160, 100), (16, 90), (1040, 1008))] == [
        (1024, 1024),
        (1328, 800),
        (672, 1568),
        (1024, 1024),
    ]
    assert reference_size((111, 95), (), 16) == (96, 80)


def test_images_of_samples_are_sampled_after_earlier_draws(engine: Engine, vae: AutoencoderKL) -> None:
    image = picture(50, 33)
    (aux,) = encode_images(engine, vae, {TensorKey.IMAGE: image}, seeds=(5, 6), earlier_draws=("float32",))
    posterior = vae.encode(expected_pixels(image).contiguous()).latent_dist
    for i, seed in enumerate((5, 6)):
        generator = torch.Generator().manual_seed(seed)
        torch.randn(1, 4, 6, 4, generator=generator)
        torch.testing.assert_close(aux[i : i + 1], scaled(vae, posterior.sample(generator)))


@pytest.mark.parametrize("binarize", [True, False])
def test_a_mask_hides_what_is_white(engine: Engine, vae: AutoencoderKL, binarize: bool) -> None:
    """A ramp keeps its greys unless they are to be black and white."""
    image, ramp = picture(32, 48), torch.linspace(0, 1, 64)[None, None, :, None].repeat(1, 96, 1, 1)
    inputs: dict[TensorKey, TensorData] = {TensorKey.IMAGE: image, TensorKey.MASK: ramp}
    hidden, folded = encode_images(engine, vae, inputs, seeds=(5, 6), binarize_mask=binarize)
    levels = Image.fromarray((ramp[0, :, :, 0] * 255).round().to(torch.uint8).numpy())
    processor = VaeImageProcessor(do_normalize=False, do_binarize=binarize, do_convert_grayscale=True)
    mask = processor.preprocess(levels, height=48, width=32)
    assert folded.shape == (2, 64, 6, 4) and len(folded.unique()) == (2 if binarize else 32)
    assert torch.equal(folded[:1].view(8, 8, 6, 4).permute(2, 0, 3, 1).reshape(48, 32), mask[0, 0])
    posterior = vae.encode((expected_pixels(image) * (1 - mask)).contiguous()).latent_dist
    torch.testing.assert_close(hidden[1:], scaled(vae, posterior.sample(torch.Generator().manual_seed(6))))


def test_masks_and_samples_must_match(engine: Engine, vae: AutoencoderKL) -> None:
    inputs: dict[TensorKey, TensorData] = {TensorKey.IMAGE: picture(32, 48), TensorKey.MASK: torch.zeros(2, 9, 9, 1)}
    hidden, folded = encode_images(engine, vae, inputs, seeds=(1, 2))
    assert hidden.shape == (2, 4, 6, 4) and folded.shape == (2, 64, 6, 4)
    with pytest.raises(InputError, match="2 masks for 3 samples"):
        encode_images(engine, vae, inputs, seeds=(1, 2, 3))
    with pytest.raises(InputError, match=r"MASK tensor must be \[B, H, W, 1\], got \(1, 9, 9, 3\)"):
        encode_images(engine, vae, {**inputs, TensorKey.MASK: torch.zeros(1, 9, 9, 3)}, seeds=(1,))


# ---- COMPOSITE


def composite(
    engine: Engine, inputs: dict[TensorKey, TensorData], size: tuple[int, int] = (64, 64), **metadata: object
) -> Tensor:
    out = run(engine, InferNodeType.COMPOSITE, {}, inputs, metadata=metadata, runtime=RuntimeConfig(size=size))
    made = out[TensorKey.IMAGE]
    assert isinstance(made, Tensor)
    return made


def test_outside_a_hole_in_the_mask_the_original_stays(engine: Engine) -> None:
    made, original, mask = picture(64, 64).repeat(2, 1, 1, 1), picture(64, 64, 1), torch.zeros(1, 64, 64, 1)
    mask[:, 8:16, 24:32] = 1
    inputs: dict[TensorKey, TensorData] = {
        TensorKey.IMAGE: made,
        TensorKey.START_IMG: original,
        TensorKey.MASK: mask,
    }
    out = composite(engine, inputs, keep="mask")
    assert torch.equal(out[:, 8:16, 24:32], made[:, 8:16, 24:32])
    outside = (mask == 0).expand(2, -1, -1, 3)
    assert torch.equal(out[outside], original.repeat(2, 1, 1, 1)[outside])
    black: dict[TensorKey, TensorData] = {**inputs, TensorKey.MASK: torch.zeros(1, 5, 7, 1)}
    assert torch.equal(composite(engine, black, keep="mask"), original.repeat(2, 1, 1, 1))
    assert torch.equal(composite(engine, inputs, keep="all"), original.repeat(2, 1, 1, 1))
    assert torch.equal(composite(engine, inputs), made)


def test_greys_of_a_mask_blend(engine: Engine) -> None:
    made, original, mask = torch.ones(1, 64, 64, 3), torch.zeros(1, 64, 64, 3), torch.full((1, 64, 64, 1), 0.2)
    inputs: dict[TensorKey, TensorData] = {
        TensorKey.IMAGE: made,
        TensorKey.START_IMG: original,
        TensorKey.MASK: mask,
    }
    torch.testing.assert_close(composite(engine, inputs, keep="mask"), torch.full((1, 64, 64, 3), 0.2))


def test_the_original_is_resized_as_for_the_autoencoder_and_cut_as_the_output(engine: Engine) -> None:
    original = picture(50, 33)
    seen = (to_vae_pixels(original[0], (64, 64)) + 1).permute(0, 2, 3, 1) / 2
    inputs: dict[TensorKey, TensorData] = {TensorKey.IMAGE: picture(60, 52), TensorKey.START_IMG: original}
    out = composite(engine, inputs, keep="all", output_size=(60, 52))
    torch.testing.assert_close(out, seen[:, 6:58, 2:62])
    with pytest.raises(InputError, match=r"the original is \(1, 64, 64, 3\), IMAGE \(1, 52, 60, 3\)"):
        composite(engine, inputs, keep="all")


def test_what_compositing_needs_is_named(engine: Engine) -> None:
    made, original = picture(64, 64), picture(64, 64, 1)
    with pytest.raises(InputError, match="COMPOSITE needs one IMAGE tensor"):
        composite(engine, {TensorKey.START_IMG: original}, keep="all")
    with pytest.raises(InputError, match="COMPOSITE has no START_IMG"):
        composite(engine, {TensorKey.IMAGE: made}, keep="all")
    with pytest.raises(InputError, match="COMPOSITE has no MASK"):
        composite(engine, {TensorKey.IMAGE: made, TensorKey.START_IMG: original}, keep="mask")
    with pytest.raises(InputError, match="3 START_IMG for 1 samples"):
        composite(engine, {TensorKey.IMAGE: made, TensorKey.START_IMG: original.repeat(3, 1, 1, 1)}, keep="all")
    with pytest.raises(InputError, match="keep must be one of none, mask, all, got 'some'"):
        composite(engine, {TensorKey.IMAGE: made}, keep="some")


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
        (InferNodeType.VAE_ENCODE_SPATIAL, {"seeds": (1,)}),
        (InferNodeType.VAE_ENCODE_IMAGES, {}),
    ],
)
def test_an_unconnected_input_is_named(
    engine: Engine, vae: AutoencoderKL, node_type: InferNodeType, metadata: dict[str, object]
) -> None:
    with pytest.raises(InputError, match=f"{node_type.name} .*(IMAGE|LATENTS)"):
        run(engine, node_type, {ModelKey.VAE_KL: vae}, {}, metadata=metadata, runtime=RuntimeConfig(size=(32, 48)))
