"""The nodes of video autoencoders and image encoders on their own: what they write, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from kdit import RuntimeConfig
from kdit.engine.engine import Engine
from kdit.errors import CheckpointError, InputError, NonFiniteError
from kdit.keys import InferNodeType, ModelKey, TensorKey
from kdit.models.image_encoder import ImageEncoder, load_image_encoder
from kdit.models.video_latents import VideoAutoencoder, VideoVaeParams, latent_frames
from tests.models.fill import distance
from tests.nodes.infer.test_infer_nodes import RUN, run

RUNTIME = RuntimeConfig(size=(32, 48), frame_num=5)
KEY = ModelKey.VAE_WAN2_1


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine.single("cpu")
    yield engine
    engine.end_run(RUN)
    assert engine.tensor_keys() == ()


@pytest.fixture(scope="module")
def folder(reference_family: Callable[[str], Path]) -> Path:
    return reference_family("wan21_i2v") / "model"


@pytest.fixture(scope="module")
def vae(folder: Path) -> Any:
    return AutoencoderKLWan.from_pretrained(folder / "vae").requires_grad_(False).eval()


def picture(seed: int, size: tuple[int, int] = (32, 48)) -> Tensor:
    levels = torch.randint(0, 256, (1, size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    return levels.float() / 255


def encoded(engine: Engine, vae: Any, inputs: dict[TensorKey, Tensor], **metadata: object) -> list[Tensor]:
    out = run(
        engine,
        InferNodeType.VAE_ENCODE_SPATIAL,
        {KEY: vae},
        dict(inputs),
        metadata={"num_samples": 1, **metadata},
        runtime=RUNTIME,
    )
    found = out[TensorKey.BASE_LATENT]
    assert isinstance(found, list)
    return found


def test_the_shape_node_writes_zeros_or_what_was_encoded(engine: Engine, vae: Any) -> None:
    def shape(inputs: dict[TensorKey, Any], runtime: RuntimeConfig = RUNTIME) -> Any:
        node = InferNodeType.VAE_COMPUTE_SHAPE
        return run(engine, node, {KEY: vae}, inputs, metadata={"num_samples": 2}, runtime=runtime)[
            TensorKey.BASE_LATENT
        ]

    empty = shape({})
    assert tuple(empty.shape) == (2, 16, 2, 6, 4) and not bool(empty.any())
    given = [torch.ones(2, 16, 2, 6, 4), torch.ones(2, 4, 2, 6, 4)]
    passed = shape({TensorKey.BASE_LATENT: given})
    assert all(torch.equal(a, b) for a, b in zip(passed, given, strict=True))
    with pytest.raises(InputError, match=r"latents \(2, 16, 1, 6, 4\), expected \(2, 16, 2, 6, 4\)"):
        shape({TensorKey.BASE_LATENT: torch.ones(2, 16, 1, 6, 4)})
    for wrong in (RuntimeConfig(size=(33, 48), frame_num=5), RuntimeConfig(size=(32, 48), frame_num=6)):
        with pytest.raises(InputError, match="takes multiples of 8 pixels and 4 n"):
            shape({}, wrong)


def test_a_first_frame_alone_is_a_video_of_its_own(engine: Engine, vae: Any) -> None:
    latent, mask = encoded(engine, vae, {TensorKey.START_IMG: picture(1)}, first_frame_alone=True)
    alone = vae.encode((picture(1) * 2 - 1).permute(0, 3, 1, 2)[:, :, None].contiguous()).latent_dist.mode()
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    assert distance(latent[:, :, :1], (alone - mean) / std) < 1e-5
    assert not bool(latent[:, :, 1:].any()) and mask[0, 0, :, 0, 0].tolist() == [1, 0]
    with pytest.raises(InputError, match="END_IMG has no place beside a first frame alone"):
        pictures = {TensorKey.START_IMG: picture(1), TensorKey.END_IMG: picture(2)}
        encoded(engine, vae, pictures, first_frame_alone=True)


def test_encoding_needs_a_start_and_room_for_an_end(engine: Engine, vae: Any) -> None:
    with pytest.raises(InputError, match="has no START_IMG"):
        encoded(engine, vae, {TensorKey.END_IMG: picture(1)})
    with pytest.raises(InputError, match="3 pictures of START_IMG for 1 samples"):
        encoded(engine, vae, {TensorKey.START_IMG: torch.cat([picture(i) for i in range(3)])})
    with pytest.raises(InputError, match="need two frames at least, got frame_num 1"):
        run(
            engine,
            InferNodeType.VAE_ENCODE_SPATIAL,
            {KEY: vae},
            {TensorKey.START_IMG: picture(1), TensorKey.END_IMG: picture(2)},
            metadata={"num_samples": 1},
            runtime=RuntimeConfig(size=(32, 48), frame_num=1),
        )


def test_decoding_is_sample_by_sample_and_cut(engine: Engine, vae: Any) -> None:
    def decode(latents: Any, **metadata: object) -> Tensor:
        node = InferNodeType.VAE_DECODE
        found = run(engine, node, {KEY: vae}, {TensorKey.LATENTS: latents}, metadata=metadata)[TensorKey.VIDEO]
        assert isinstance(found, Tensor)
        return found

    latents = torch.randn(2, 16, 2, 6, 4, generator=torch.Generator().manual_seed(1))
    both = decode(latents)
    assert tuple(both.shape) == (2, 5, 48, 32, 3) and torch.equal(both[1:], decode(latents[1:]))
    assert torch.equal(decode(latents, output_frames=2, output_size=(30, 40)), both[:, :2, 4:44, 1:31])
    for wrong in (latents[0], latents[:, :15], [latents]):
        with pytest.raises(InputError, match="LATENTS"):
            decode(wrong)
    with pytest.raises(NonFiniteError, match="decode: the autoencoder gave NaN"):
        decode(latents * float("nan"))


def test_decoding_undoes_encoding_of_the_statistics(vae: Any) -> None:
    view = VideoAutoencoder(vae)
    assert (view.channels, view.factor, view.temporal_factor) == (16, 8, 4)
    latents = torch.randn(1, 16, 2, 6, 4, generator=torch.Generator().manual_seed(1))
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    expected = vae.decode(latents * std + mean, return_dict=False)[0]
    assert distance(view.decode(latents), (expected * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)) < 1e-5


@pytest.mark.parametrize(("frames", "latent"), [(1, 1), (5, 2), (15, 4), (33, 9), (81, 21)])
def test_latent_frames(frames: int, latent: int) -> None:
    assert latent_frames(frames, 4) == latent


def test_absent_settings_of_an_autoencoder_are_the_librarys() -> None:
    published: Any = AutoencoderKLWan(base_dim=8, num_res_blocks=1).config
    params = VideoVaeParams.from_config({"base_dim": 8, "z_dim": 16})
    assert (params.channels, params.factor, params.temporal_factor) == (
        published.z_dim,
        published.scale_factor_spatial,
        published.scale_factor_temporal,
    )
    assert params.features == 8 and VideoVaeParams.from_config({"decoder_base_dim": 12}).features == 12
    with pytest.raises(CheckpointError, match="z_dim is 0"):
        VideoVaeParams.from_config({"z_dim": 0})


@pytest.fixture(scope="module")
def encoder(folder: Path) -> ImageEncoder:
    dtype, device = torch.float32, torch.device("cpu")
    return load_image_encoder(folder / "image_encoder", folder / "image_processor", dtype=dtype, device=device)


def test_an_image_encoder_reads_each_picture_once(engine: Engine, encoder: ImageEncoder) -> None:
    def tokens(num_samples: int = 1, **pictures: Any) -> Tensor:
        inputs = {TensorKey[name]: value for name, value in pictures.items()}
        metadata: dict[str, object] = {"num_samples": num_samples}
        node, models = InferNodeType.IMAGE_ENCODE, {ModelKey.CLIPImageEncoder: encoder}
        found = run(engine, node, models, inputs, metadata=metadata)[TensorKey.AUX_LATENT]
        assert isinstance(found, Tensor)
        return found

    one, other = picture(1), picture(2, (50, 20))
    assert tuple(tokens(START_IMG=one).shape) == (1, 17, 72)
    assert torch.equal(tokens(START_IMG=one, END_IMG=other)[:, 17:], tokens(START_IMG=other))
    assert tuple(tokens(3, START_IMG=one).shape) == (3, 17, 72)
    assert torch.equal(tokens(2, START_IMG=[one, other])[1:], tokens(START_IMG=other))
    with pytest.raises(InputError, match="2 pictures of END_IMG for 3 samples"):
        tokens(3, START_IMG=one, END_IMG=[one, other])
    with pytest.raises(InputError, match="has no START_IMG"):
        tokens()
