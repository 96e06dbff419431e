"""Wan's image to video: start and end pictures, their encoders, frames, sizes, feeds, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from kdit import ExecuteConfig, InputError, Pipeline, PipelineRun, RuntimeConfig, SampleConfig, TensorKey
from kdit.errors import CheckpointError
from kdit.keys import InferNodeType, IONodeType
from kdit.media.image_fit import fit_image
from kdit.media.image_reader import read_image
from kdit.nodes.core.pin_def import PinRef
from kdit.pipelines.context_builders.wan import WanI2VExtraInputs
from kdit.pipelines.extra_inputs import MediaInputs
from kdit.pipelines.result import GenerateResult
from kdit.tensor.tensor_pool_key import TensorPoolKey
from tests.models.fill import distance
from tests.pipelines.sd3_images import picture
from tests.pipelines.small import damaged

ONE = SampleConfig(steps=1, cfg_scale=1.0)
KEY = TensorKey.BASE_LATENT
Given = dict[str, str | list[str]]


def runtime(**changes: object) -> RuntimeConfig:
    return RuntimeConfig(**{"seed": 3, "size": (32, 48), "frame_num": 5, "output_type": "latents", **changes})  # type: ignore[arg-type]


def video(
    pipe: Pipeline, prompt: str | list[str] = "a fox", *, given: Given | None = None, **changes: object
) -> GenerateResult:
    arguments: dict[str, object] = dict(sample_config=ONE, runtime_config=runtime())
    if given is not None:
        arguments["extra_inputs"] = WanI2VExtraInputs(**given)  # type: ignore[arg-type]
    return pipe.generate(prompt, **{**arguments, **changes})  # type: ignore[arg-type]


def begun(
    pipe: Pipeline, prompt: str | list[str], given: Given, *hold: TensorKey, config: RuntimeConfig | None = None
) -> PipelineRun:
    request = pipe.request(
        prompt,
        sample_config=ONE,
        runtime_config=config or runtime(),
        extra_inputs=WanI2VExtraInputs(**given),  # type: ignore[arg-type]
    )
    return pipe.begin(request, hold=hold)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
    return [picture(folder / f"{i}.png", (48, 40), i) for i in range(3)]


@pytest.fixture(scope="module")
def a14b(reference_family: Callable[[str], Path]) -> Pipeline:
    return Pipeline.from_models(reference_family("wan22_i2v_a14b") / "model")


@pytest.fixture(scope="module")
def i2v(reference_family: Callable[[str], Path]) -> Pipeline:
    return Pipeline.from_models(reference_family("wan21_i2v") / "model")


@pytest.fixture(scope="module")
def flf2v(reference_family: Callable[[str], Path]) -> Pipeline:
    return Pipeline.from_models(reference_family("wan21_flf2v") / "model")


@pytest.fixture(scope="module")
def ti2v_folder(reference_family: Callable[[str], Path]) -> Path:
    return reference_family("wan22_ti2v_5b_i2v") / "model"


@pytest.fixture(scope="module")
def ti2v(ti2v_folder: Path) -> Pipeline:
    return Pipeline.from_models(ti2v_folder)


def base_latent(run: PipelineRun) -> tuple[torch.Tensor, torch.Tensor]:
    """What reached the loop: two nodes write this key."""
    (node_id,) = (
        e.src.node_id for e in run._builder.pipeline_def.edges if e.dst == PinRef(run.generate_node.node_id, KEY)
    )
    latent, mask = run.engine.get_tensor(TensorPoolKey(node_id, KEY), run=run.run_id)
    return latent, mask


def test_two_readers_are_told_apart_by_where_they_lead(flf2v: Pipeline, pictures: list[str]) -> None:
    start, end = pictures[:2]
    request = flf2v.request(
        "a", runtime_config=runtime(), extra_inputs=WanI2VExtraInputs(start_img_path=start, end_img_path=end)
    )
    nodes = [node for node in flf2v.pipeline_def.nodes if node.node_type is IONodeType.READ_IMAGE]
    read = {
        request.builder._find_downstream_pin(node.node_id, TensorKey.IMAGE): request.builder.build_context(
            node, request.inputs
        ).metadata
        for node in nodes
    }
    assert read == {
        TensorKey.START_IMG: {"img_paths": [start], "kind": "image"},
        TensorKey.END_IMG: {"img_paths": [end], "kind": "image"},
    }


def test_given_frames_are_encoded_in_a_video_that_is_black_between(a14b: Pipeline, pictures: list[str]) -> None:
    with begun(a14b, "a", {"start_img_path": pictures[0], "end_img_path": pictures[1]}, TensorKey.BASE_LATENT) as run:
        latent, mask = base_latent(run)
    assert tuple(latent.shape) == (1, 16, 2, 6, 4) and tuple(mask.shape) == (1, 4, 2, 6, 4)
    assert mask[0, :, :, 0, 0].tolist() == [[1, 0], [1, 0], [1, 0], [1, 1]]  # frame 1 four times; 2, 3, 4 and 5
    import diffusers

    judge = diffusers.AutoencoderKLWan.from_pretrained(a14b.checkpoint.path / "vae")
    frames = torch.zeros(1, 3, 5, 48, 32)
    for index, path in ((0, pictures[0]), (4, pictures[1])):
        frames[:, :, index] = fit_image(read_image(path)[0], (32, 48), "reject").permute(2, 0, 1) * 2 - 1
    with torch.no_grad():
        expected = judge.encode(frames).latent_dist.mode()
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (judge.config.latents_mean, judge.config.latents_std))
    assert distance(latent, (expected - mean) / std) < 1e-5


@pytest.mark.parametrize("frames", [1, 2, 4, 5, 15, 33, 81])
@pytest.mark.parametrize("with_end", [False, True], ids=["start", "start_and_end"])
def test_frame_counts_and_their_masks(a14b: Pipeline, pictures: list[str], frames: int, with_end: bool) -> None:
    given: Given = {"start_img_path": pictures[0]}
    if with_end:
        given["end_img_path"] = pictures[1]
    made = (frames + 2) // 4 * 4 + 1
    if made != frames:
        with pytest.raises(InputError, match=rf"`frame_num` is {frames}, .* nearest: {made - 4} or {made} "):
            video(a14b, given=given, runtime_config=runtime(frame_num=frames))
    config = runtime(frame_num=frames, fit="crop", size=(16, 16))
    if with_end and (made == 1 or made != frames):
        with pytest.raises(InputError, match=r"end_img_path`: (a video of one frame|of .* the end would be lost)"):
            video(a14b, given=given, runtime_config=config)
        return
    with begun(a14b, "a", given, TensorKey.BASE_LATENT, config=config) as run:
        latent, mask = base_latent(run)
        assert latent.shape[2] == mask.shape[2] == (made - 1) // 4 + 1
        expected = torch.zeros(mask.shape[2] * 4)  # frame 1 four times, then each frame once
        expected[:4] = 1
        expected[-1] = 1 if with_end or made == 1 else 0
        assert torch.equal(mask[0, :, :, 0, 0].T.reshape(-1), expected)
        while run.steps_left:
            a14b.step([run])
        assert tuple(run.finish().latents.shape) == tuple(latent.shape)


def test_each_sample_may_have_pictures_of_its_own(a14b: Pipeline, pictures: list[str]) -> None:
    given: Given = {"start_img_path": pictures[:2], "end_img_path": pictures[2]}
    both = video(a14b, ["a fox", "boats"], given=given)
    for i, prompt in enumerate(("a fox", "boats")):
        own: Given = {"start_img_path": pictures[i], "end_img_path": pictures[2]}
        alone = video(a14b, prompt, given=own, runtime_config=runtime(seed=3 + i))
        assert distance(both.latents[i : i + 1], alone.latents) < 1e-5
    with pytest.raises(InputError, match="start_img_path` has 2 entries for 3 prompts"):
        video(a14b, ["a", "b", "c"], given={"start_img_path": pictures[:2]})


@pytest.mark.parametrize("fixture", ["a14b", "i2v", "flf2v", "ti2v"])
def test_batches_of_pictures_can_be_bit_equal(
    fixture: str, request: pytest.FixtureRequest, pictures: list[str]
) -> None:
    folder = request.getfixturevalue(fixture).checkpoint.path
    exact = Pipeline.from_models(folder, execute_config=ExecuteConfig(batch_invariant=True))
    given: Given = {"start_img_path": pictures[:2]}
    if fixture == "flf2v":
        given["end_img_path"] = pictures[2]
    config = SampleConfig(steps=2, cfg_scale=2.0)
    both = video(exact, ["a fox", "boats"], given=given, sample_config=config, runtime_config=runtime(size=(32, 64)))
    alone = video(
        exact,
        "boats",
        given={**given, "start_img_path": pictures[1]},
        sample_config=config,
        runtime_config=runtime(size=(32, 64), seed=4),
    )
    assert torch.equal(both.latents[1:], alone.latents)


def test_tokens_of_both_pictures_are_joined(flf2v: Pipeline, i2v: Pipeline, pictures: list[str]) -> None:
    def tokens(pipe: Pipeline, given: Given, prompt: str | list[str] = "a") -> torch.Tensor:
        with begun(pipe, prompt, given, TensorKey.AUX_LATENT) as run:
            found = run.fetch(TensorKey.AUX_LATENT)
        assert isinstance(found, torch.Tensor)
        return found

    both = tokens(flf2v, {"start_img_path": pictures[0], "end_img_path": pictures[1]})
    swapped = tokens(flf2v, {"start_img_path": pictures[1], "end_img_path": pictures[0]})
    assert tuple(both.shape) == (1, 34, 72)
    assert torch.equal(both[:, :17], swapped[:, 17:]) and torch.equal(both[:, 17:], swapped[:, :17])
    one = tokens(i2v, {"start_img_path": pictures[0]}, ["a", "b"])
    assert tuple(one.shape) == (2, 17, 72) and torch.equal(one[0], one[1])


def test_the_image_encoder_sees_what_transformers_makes_of_the_file(i2v: Pipeline, pictures: list[str]) -> None:
    import transformers

    folder = i2v.checkpoint.path
    processor = transformers.CLIPImageProcessorPil.from_pretrained(folder / "image_processor")
    judge = transformers.CLIPVisionModel.from_pretrained(folder / "image_encoder")
    with torch.no_grad(), Image.open(pictures[0]) as image:
        expected = judge(**processor(images=image, return_tensors="pt"), output_hidden_states=True).hidden_states[-2]
    with begun(i2v, "a", {"start_img_path": pictures[0]}, TensorKey.AUX_LATENT) as run:
        found = run.fetch(TensorKey.AUX_LATENT)
    assert isinstance(found, torch.Tensor) and distance(found, expected) < 1e-6


def test_pictures_change_the_video(a14b: Pipeline, i2v: Pipeline, pictures: list[str]) -> None:
    for pipe in (a14b, i2v):
        first, second = (video(pipe, given={"start_img_path": path}).latents for path in pictures[:2])
        assert distance(second, first) > 1e-4
    with_end = video(a14b, given={"start_img_path": pictures[0], "end_img_path": pictures[1]}).latents
    assert distance(with_end, video(a14b, given={"start_img_path": pictures[0]}).latents) > 1e-4


def test_a_picture_of_another_shape_follows_fit(a14b: Pipeline, tmp_path: Path) -> None:
    wide = picture(tmp_path / "wide.png", (96, 48), 1)
    found = {}
    for fit in ("reject", "pad", "crop"):
        with begun(a14b, "a", {"start_img_path": wide}, TensorKey.BASE_LATENT, config=runtime(fit=fit)) as run:
            found[fit] = base_latent(run)[0]
    assert distance(found["pad"], found["reject"]) > 1e-3 and distance(found["crop"], found["reject"]) > 1e-3


def test_the_default_size_has_the_pictures_shape(a14b: Pipeline, ti2v: Pipeline, tmp_path: Path) -> None:
    def size(pipe: Pipeline, own: tuple[int, int]) -> tuple[int, int]:
        path = picture(tmp_path / f"{own}.png", own, 0)
        request = pipe.request("a", extra_inputs=WanI2VExtraInputs(start_img_path=path))
        return request.inputs.output_size

    for pipe, multiple, area in ((a14b, 16, 832 * 480), (ti2v, 32, 1280 * 704)):
        for own in ((208, 304), (104, 152), (64, 64), (90, 51)):
            width, height = size(pipe, own)
            assert width % multiple == height % multiple == 0
            assert 0.85 * area < width * height <= area
            assert abs(width / height - own[0] / own[1]) < 0.12 * own[0] / own[1]
    assert ti2v.request("a").inputs.output_size == (1280, 704)


def test_5b_makes_videos_with_and_without_a_picture(
    ti2v: Pipeline, reference_family: Callable[[str], Path], pictures: list[str]
) -> None:
    other = Pipeline.from_models(reference_family("wan22_ti2v_5b") / "model")  # of the other class
    config = runtime(size=(32, 64))
    for pipe in (ti2v, other):
        with begun(pipe, "a", {"start_img_path": pictures[0]}, TensorKey.BASE_LATENT, config=config) as run:
            latent, mask = base_latent(run)
            while run.steps_left:
                pipe.step([run])
            result = run.finish()
        assert tuple(latent.shape) == (1, 12, 2, 4, 2) and not bool(latent[:, :, 1:].any())
        assert mask[0, 0, :, 0, 0].tolist() == [1, 0]
        assert torch.equal(result.latents[:, :, 0], latent[:, :, 0])
        plain = video(pipe, runtime_config=config).latents
        assert distance(plain[:, :, 0], latent[:, :, 0]) > 0.1


def test_encoded_frames_can_be_fed(a14b: Pipeline, ti2v: Pipeline, pictures: list[str]) -> None:
    for pipe, config in ((a14b, runtime()), (ti2v, runtime(size=(32, 64)))):
        given: Given = {"start_img_path": pictures[0]}
        with begun(pipe, "a fox", given, TensorKey.BASE_LATENT, config=config) as run:
            latent = base_latent(run)[0].clone()
        fed = video(pipe, feeds={TensorKey.BASE_LATENT: latent}, runtime_config=config)
        assert torch.equal(fed.latents, video(pipe, given=given, runtime_config=config).latents)
        with pytest.raises(InputError, match="no effect where BASE_LATENT is fed"):
            video(pipe, given=given, feeds={TensorKey.BASE_LATENT: latent}, runtime_config=config)


def test_tokens_of_the_image_encoder_can_be_fed(i2v: Pipeline, pictures: list[str]) -> None:
    given: Given = {"start_img_path": pictures[0]}
    with begun(i2v, "a fox", given, TensorKey.BASE_LATENT, TensorKey.AUX_LATENT) as run:
        latent, tokens = base_latent(run)[0].clone(), run.fetch(TensorKey.AUX_LATENT)
    assert isinstance(tokens, torch.Tensor)
    expected, tokens = video(i2v, given=given).latents, tokens.clone()
    both = {TensorKey.BASE_LATENT: latent, TensorKey.AUX_LATENT: tokens}
    assert torch.equal(video(i2v, feeds=both).latents, expected)
    assert torch.equal(video(i2v, given=given, feeds={TensorKey.AUX_LATENT: tokens}).latents, expected)
    assert torch.equal(video(i2v, given=given, feeds={TensorKey.BASE_LATENT: latent}).latents, expected)
    with pytest.raises(InputError, match="also reads the image"):
        video(i2v, feeds={TensorKey.BASE_LATENT: latent})


def test_pictures_that_a_model_does_not_take_are_refused(
    a14b: Pipeline, i2v: Pipeline, flf2v: Pipeline, ti2v: Pipeline, pictures: list[str]
) -> None:
    start, end = pictures[:2]
    both: Given = {"start_img_path": start, "end_img_path": end}
    for pipe, given, message in (
        (a14b, None, "makes a video from an image: give `extra_inputs.start_img_path`"),
        (a14b, {"end_img_path": end}, "end_img_path` needs `extra_inputs.start_img_path`"),
        (i2v, both, "was made for a start image alone"),
        (flf2v, {"start_img_path": start}, "between two images: give `extra_inputs.end_img_path` too"),
        (ti2v, both, "takes a start image alone"),
        (a14b, {"start_img_path": "none.png"}, "none.png"),
    ):
        with pytest.raises(InputError, match=message):
            video(pipe, given=given, runtime_config=runtime(size=(32, 64)))
    with pytest.raises(InputError, match="takes exactly 512 tokens"):
        video(i2v, given={"start_img_path": start}, sample_config=SampleConfig(steps=1, max_sequence_length=48))


def test_files_of_a_command_line_become_its_inputs(a14b: Pipeline) -> None:
    take = a14b.family.take_media
    assert take(MediaInputs(images=("a.png",), last_image="b.png")) == WanI2VExtraInputs(
        start_img_path="a.png", end_img_path="b.png"
    )
    assert take(MediaInputs(images=("a.png", "c.png"))) == WanI2VExtraInputs(start_img_path=["a.png", "c.png"])
    assert take(MediaInputs()) is None
    with pytest.raises(InputError, match="Wan takes no `mask`"):
        take(MediaInputs(images=("a.png",), mask="m.png"))


def test_an_image_encoder_that_is_missing_or_of_another_kind_is_refused(i2v: Pipeline, tmp_path: Path) -> None:
    folder = i2v.checkpoint.path
    with pytest.raises(CheckpointError, match="has no component 'image_encoder'"):
        Pipeline.open(damaged(folder, tmp_path / "a", "model_index.json", image_encoder=[None, None]))
    other = damaged(folder, tmp_path / "b", "image_processor/preprocessor_config.json", image_processor_type="Siglip")
    with pytest.raises(CheckpointError, match="image_processor_type is 'Siglip'"):
        Pipeline.from_models(other)


def test_a_model_without_image_encoder_has_no_node_for_it(a14b: Pipeline, i2v: Pipeline) -> None:
    held = [InferNodeType.IMAGE_ENCODE in {n.node_type for n in pipe.pipeline_def.nodes} for pipe in (a14b, i2v)]
    assert held == [False, True]
