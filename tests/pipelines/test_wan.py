"""Wan's text to video: texts, guidance of two experts, frames, defaults, feeds, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kdit import ExecuteConfig, InputError, Pipeline, RuntimeConfig, SampleConfig, TensorKey, UnsupportedOptionError
from kdit.errors import CheckpointError, NonFiniteError
from kdit.keys import ModelKey
from kdit.models.checkpoint import Checkpoint
from kdit.pipelines.context_builders.wan import WanI2VExtraInputs, clean_text
from kdit.pipelines.defs.wan import PIPELINES
from kdit.pipelines.registry import pipeline_of
from kdit.pipelines.result import GenerateResult
from tests.models.fill import distance
from tests.pipelines.small import damaged, start

TWO_EXPERTS = SampleConfig(steps=3, max_sequence_length=24, cfg_scale=2.0, cfg_scale_2=3.0)
PLAIN = SampleConfig(steps=2, max_sequence_length=24, cfg_scale=1.0)


def runtime(**changes: object) -> RuntimeConfig:
    return RuntimeConfig(**{"seed": 3, "size": (32, 48), "frame_num": 5, "output_type": "latents", **changes})  # type: ignore[arg-type]


def video(pipe: Pipeline, prompt: str | list[str] = "a red fox", **changes: object) -> GenerateResult:
    arguments: dict[str, object] = dict(sample_config=PLAIN, runtime_config=runtime())
    return pipe.generate(prompt, **{**arguments, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(reference_family: Callable[[str], Path]) -> Path:
    return reference_family("wan22_t2v_a14b") / "model"


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return Pipeline.from_models(folder)


@pytest.fixture(scope="module")
def plain(reference_family: Callable[[str], Path]) -> Pipeline:
    return Pipeline.from_models(reference_family("wan21_t2v") / "model")


def states(pipe: Pipeline, prompt: str, length: int = 512) -> torch.Tensor:
    config = SampleConfig(steps=1, cfg_scale=1.0, max_sequence_length=length)
    held = (TensorKey.POSITIVE,)
    with start(pipe, prompt, sample_config=config, runtime_config=runtime(frame_num=1), hold=held) as run:
        (found,) = run.fetch(TensorKey.POSITIVE)
    return found


@pytest.mark.parametrize("count", [76, 77, 78, 300, 511, 513])
def test_a_prompt_counts_up_to_512_tokens_and_a_longer_one_is_told(pipe: Pipeline, count: int) -> None:
    result = video(pipe, "a " * count, sample_config=SampleConfig(steps=1, cfg_scale=1.0))
    long = count + 1 > 512
    assert [n.partition(";")[0] for n in result.notices] == (
        [f"prompt has {count + 1} tokens for UMT5TextEncoder, which takes 512"] if long else []
    )
    found = states(pipe, "a " * count)
    used = min(count + 1, 512)  # the end token counts
    assert bool(found[:, used:].eq(0).all()) and bool(found[:, :used].ne(0).any(-1).all())
    if long:
        strict = SampleConfig(steps=1, cfg_scale=1.0, on_long_prompt="reject")
        with pytest.raises(InputError, match="UMT5TextEncoder, which takes 512"):
            video(pipe, "a " * count, sample_config=strict)


def test_prompts_are_cleaned_as_the_reference_cleans_them() -> None:
    assert clean_text("  a\n red \t fox ") == "a red fox"
    assert clean_text("cats &amp;amp; dogs &lt;3") == "cats & dogs <3"
    assert (
        clean_text("caf\u00c3\u00a9 \u00e2\u20ac\u201c bar") == "caf\u00e9 \u2013 bar"
    )  # text that was decoded wrongly
    assert clean_text("かわいい 😄 (a:1.2) [b]") == "かわいい 😄 (a:1.2) [b]"  # brackets are text
    assert clean_text("") == ""


def test_a_cleaned_prompt_is_what_the_encoder_reads(pipe: Pipeline) -> None:
    assert torch.equal(states(pipe, "a  &quot;red&quot;\nfox"), states(pipe, 'a "red" fox'))
    assert distance(states(pipe, "a red fox"), states(pipe, "two boats")) > 0.1


def test_each_prompt_of_a_batch_is_as_if_alone(pipe: Pipeline) -> None:
    prompts, negatives = ["a", "two small boats drift under a stone bridge " * 2], ["blurry", "b"]
    both = video(pipe, prompts, sample_config=TWO_EXPERTS, prompt_negative=negatives)
    assert both.seeds == (3, 4)
    for i in range(2):
        alone = video(
            pipe,
            prompts[i],
            sample_config=TWO_EXPERTS,
            prompt_negative=negatives[i],
            runtime_config=runtime(seed=3 + i),
        )
        assert distance(both.latents[i : i + 1], alone.latents) < 1e-5
    assert distance(both.latents[:1], both.latents[1:]) > 0.1


def test_batches_can_be_bit_equal(folder: Path) -> None:
    exact = Pipeline.from_models(folder, execute_config=ExecuteConfig(batch_invariant=True))
    both = video(exact, ["a red fox", "boats"], sample_config=TWO_EXPERTS)
    alone = video(exact, "boats", sample_config=TWO_EXPERTS, runtime_config=runtime(seed=4))
    assert torch.equal(both.latents[1:], alone.latents)


def test_inline_modulation_gives_the_same_bits_row_by_row(folder: Path) -> None:
    found = [
        video(
            Pipeline.from_models(folder, execute_config=ExecuteConfig(batch_invariant=True, modulation=mode)),
            sample_config=TWO_EXPERTS,
        ).latents
        for mode in ("table", "inline")
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_without_guidance_what_belongs_to_it_is_told_and_costs_nothing(pipe: Pipeline, scale: float) -> None:
    config = SampleConfig(steps=2, max_sequence_length=12, cfg_scale=scale, cfg_scale_2=7.0)
    with start(pipe, "a", prompt_negative="blurry", sample_config=config, runtime_config=runtime()) as run:
        pipe.step([run])
        assert run.peek()["prediction"].shape[0] == 1
        assert [notice.split()[0] for notice in run.notices] == ["`cfg_scale_2`", "`prompt_negative`"]


def test_no_negative_prompt_is_the_empty_one(pipe: Pipeline) -> None:
    none = video(pipe, sample_config=TWO_EXPERTS).latents
    assert torch.equal(none, video(pipe, sample_config=TWO_EXPERTS, prompt_negative="").latents)
    assert distance(video(pipe, sample_config=TWO_EXPERTS, prompt_negative="blurry").latents, none) > 1e-4
    with pytest.raises(InputError, match="prompt_negative` has 2 entries for 1 prompts"):
        video(pipe, sample_config=TWO_EXPERTS, prompt_negative=["a", "b"])


def test_seed_0_is_a_seed_and_none_is_drawn_and_told(plain: Pipeline) -> None:
    zero = video(plain, runtime_config=runtime(seed=0))
    assert zero.seeds == (0,) and torch.equal(zero.latents, video(plain, runtime_config=runtime(seed=0)).latents)
    assert distance(zero.latents, video(plain).latents) > 0.1
    drawn = video(plain, runtime_config=runtime(seed=None))
    again = video(plain, runtime_config=runtime(seed=drawn.seeds[0]))
    assert torch.equal(drawn.latents, again.latents)


def scales(pipe: Pipeline, **given: float) -> tuple[object, object]:
    request = pipe.request("a", sample_config=SampleConfig(**given), runtime_config=runtime())  # type: ignore[arg-type]
    return request.inputs.sample_config.cfg_scale, request.inputs.sample_config.cfg_scale_2


def test_a_second_scale_follows_the_first_unless_one_is_given(pipe: Pipeline, plain: Pipeline) -> None:
    assert scales(pipe) == (4.0, 3.0)  # as published
    assert scales(pipe, cfg_scale=6.0) == (6.0, 6.0)
    assert scales(pipe, cfg_scale_2=2.0) == (4.0, 2.0)
    assert scales(pipe, cfg_scale=0.0) == (0.0, 0.0)
    assert scales(plain) == (5.0, None)
    with pytest.raises(UnsupportedOptionError, match="`cfg_scale_2` is for models with a second expert"):
        scales(plain, cfg_scale_2=2.0)
    with pytest.raises(UnsupportedOptionError, match="use `cfg_scale`"):
        scales(plain, guidance_scale=2.0)
    with pytest.raises(UnsupportedOptionError, match="does not begin at an image"):
        video(plain, sample_config=SampleConfig(strength=0.5))


@pytest.mark.parametrize("boundary", [0.0, 0.9999])
def test_either_expert_may_get_no_step(folder: Path, tmp_path: Path, boundary: float) -> None:
    pipe = Pipeline.from_models(damaged(folder, tmp_path, "model_index.json", boundary_ratio=boundary))
    one = SampleConfig(steps=1, max_sequence_length=12, cfg_scale=2.0, cfg_scale_2=5.0)
    two = SampleConfig(steps=1, max_sequence_length=12, cfg_scale=2.0, cfg_scale_2=2.0)
    assert torch.equal(video(pipe, sample_config=one).latents, video(pipe, sample_config=two).latents) == (
        boundary == 0
    )


def test_repeated_runs_are_bit_equal_whatever_ran_between(pipe: Pipeline) -> None:
    first = video(pipe, sample_config=TWO_EXPERTS).latents
    video(pipe, ["a", "b"], runtime_config=runtime(frame_num=9, size=(48, 32)))
    assert torch.equal(video(pipe, sample_config=TWO_EXPERTS).latents, first)


@pytest.mark.parametrize("frames", [1, 2, 4, 5, 15, 33, 81])
def test_frames_are_4n_plus_1_or_refused_or_made_and_cut(plain: Pipeline, frames: int) -> None:
    def shape(fit: str) -> tuple[int, ...]:
        config = runtime(frame_num=frames, fit=fit, output_type="latents")
        return tuple(
            video(plain, sample_config=SampleConfig(steps=1, cfg_scale=1.0), runtime_config=config).latents.shape
        )

    made = (frames + 2) // 4 * 4 + 1
    expected = (1, 16, (made - 1) // 4 + 1, 6, 4)
    if made == frames:
        assert shape("reject") == expected
    else:
        with pytest.raises(InputError, match=rf"`frame_num` is {frames}, .* nearest: {made - 4} or {made} "):
            shape("reject")
        assert shape("crop") == expected


@pytest.mark.parametrize(("frames", "size"), [(1, (32, 48)), (6, (30, 41)), (4, (32, 48))])
def test_a_video_has_the_frames_and_the_size_that_were_asked_for(
    plain: Pipeline, frames: int, size: tuple[int, int]
) -> None:
    config = runtime(frame_num=frames, size=size, fit="crop", output_type="decoded")
    result = video(plain, ["a", "b"], runtime_config=config)
    assert result.video is not None and tuple(result.video.shape) == (2, frames, size[1], size[0], 3)
    assert bool(((result.video >= 0) & (result.video <= 1)).all()) and float(result.video.std()) > 0.01
    assert (result.settings["size"], result.settings["frame_num"]) == (list(size), frames)
    if frames == 1:
        assert result.pixels is not None and torch.equal(result.pixels, result.video[:, 0])
    else:
        assert result.pixels is None


def test_what_is_cut_is_what_the_whole_video_begins_with(plain: Pipeline) -> None:
    whole = video(plain, runtime_config=runtime(output_type="decoded")).video
    cut = video(plain, runtime_config=runtime(frame_num=3, size=(30, 44), fit="crop", output_type="decoded")).video
    assert whole is not None and cut is not None
    assert torch.equal(cut, whole[:, :3, 2:46, 1:31])


def test_sizes_that_cannot_be_made_name_the_nearest(plain: Pipeline) -> None:
    with pytest.raises(InputError, match="multiples of 16; nearest: 32x48"):
        video(plain, runtime_config=runtime(size=(31, 47)))
    with pytest.raises(InputError, match="at most 1024 pixels along each side"):  # 64 positions of 16 pixels
        video(plain, runtime_config=runtime(size=(1040, 16)))
    with pytest.raises(InputError, match="at most 253 frames"):
        video(plain, runtime_config=runtime(frame_num=257))


def test_a_video_beyond_all_memory_is_refused_by_its_needs(reference_family: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint.open(reference_family("wan21_t2v") / "model")
    family = pipeline_of(checkpoint)
    pipe = Pipeline.open(checkpoint.path)

    def need(rows: int, **changes: object) -> int:
        config = runtime(**{"output_type": "decoded", **changes})
        sample = SampleConfig(max_sequence_length=1, cfg_scale=1.0)
        inputs = pipe.request("a", sample_config=sample, runtime_config=config).inputs
        return family.memory_floor(checkpoint, inputs, rows)

    small = need(1)
    assert need(1, frame_num=49) > 2 * small and need(1, size=(320, 480)) > 50 * small
    assert need(2, output_type="latents") > need(1, output_type="latents")
    largest = runtime(size=(1024, 1024), frame_num=253, output_type="decoded")
    with pytest.raises(InputError, match=r"2000 x 1024x1024, 253 frames needs at least [\d.]+ GiB"):
        pipe.request(["a"] * 2000, runtime_config=largest)


def test_text_can_be_fed(pipe: Pipeline) -> None:
    found = states(pipe, "a red fox", 24)
    fed = video(pipe, "something else", feeds={TensorKey.POSITIVE: [found]})
    assert torch.equal(fed.latents, video(pipe).latents) and fed.settings["fed"] == ["positive"]
    with pytest.raises(InputError, match="Wan text is"):
        video(pipe, feeds={TensorKey.POSITIVE: [found, found]})


def test_noise_and_latents_can_be_fed(plain: Pipeline) -> None:
    noise = torch.randn(1, 16, 2, 6, 4, generator=torch.Generator().manual_seed(3))
    expected = video(plain)
    assert torch.equal(video(plain, feeds={TensorKey.NOISE: noise}).latents, expected.latents)
    decoded = video(plain, runtime_config=runtime(output_type="decoded"))
    fed = video(
        plain, feeds={TensorKey.LATENTS: expected.latents}, runtime_config=runtime(output_type="decoded", seed=9)
    )
    assert fed.video is not None and decoded.video is not None and torch.equal(fed.video, decoded.video)
    with pytest.raises(InputError, match=r"expected \[B, 16, 2, 6, 4\]"):
        video(plain, feeds={TensorKey.NOISE: noise[:, :, :1]})
    with pytest.raises(InputError, match="makes videos of text alone"):
        video(plain, feeds={TensorKey.BASE_LATENT: noise})


def test_text_to_video_takes_no_pictures(plain: Pipeline) -> None:
    with pytest.raises(InputError, match=r"Wan \(wan2.1-t2v\) takes none, got WanI2VExtraInputs"):
        video(plain, extra_inputs=WanI2VExtraInputs(start_img_path="a.png"))


@pytest.mark.parametrize(
    ("family", "key", "networks"),
    [
        ("wan21_t2v", "wan2.1-t2v", 1),
        ("wan21_i2v", "wan2.1-i2v", 1),
        ("wan22_t2v_a14b", "wan2.2-t2v-14b", 2),
        ("wan22_i2v_a14b", "wan2.2-i2v-14b", 2),
        ("wan22_ti2v_5b", "wan2.2-ti2v-5b", 1),
        ("wan22_ti2v_5b_i2v", "wan2.2-ti2v-5b", 1),
    ],
)
def test_a_folder_is_run_by_the_pipeline_that_it_states(
    family: str, key: str, networks: int, reference_family: Callable[[str], Path]
) -> None:
    checkpoint = Checkpoint.open(reference_family(family) / "model")
    found = pipeline_of(checkpoint)
    assert found.key.value == key
    loaded = [n.model_key for n in found.build(checkpoint).nodes if n.model_key and n.node_type.value == "load_model"]
    assert sum(model.kind.value == "network" for model in loaded) == networks
    assert (ModelKey.CLIPImageEncoder in loaded) == (family == "wan21_i2v")


def test_published_defaults(reference_family: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint.open(reference_family("wan22_t2v_a14b") / "model")
    by_key = {p.key.value: p for p in PIPELINES}
    stated = by_key["wan2.2-t2v-14b"].defaults(checkpoint)
    assert (stated.size, stated.frame_num, stated.frame_step, stated.fps, stated.steps) == ((832, 480), 81, 4, 16, 50)
    small = Checkpoint.open(reference_family("wan22_ti2v_5b") / "model")
    stated = by_key["wan2.2-ti2v-5b"].defaults(small)
    assert (stated.size, stated.frame_num, stated.fps, stated.size_multiple) == ((1280, 704), 121, 24, 32)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("model_index.json", {"boundary_ratio": 1.5}, "boundary_ratio is 1.5, expected a number from 0 to 1"),
        ("model_index.json", {"boundary_ratio": "high"}, "boundary_ratio is 'high'"),
        ("model_index.json", {"transformer_2": [None, None]}, "has no component 'transformer_2'"),
        ("vae/config.json", {"latents_std": [1.0] * 15 + [0.0]}, "latents_std is .* 16 positive numbers"),
        ("vae/config.json", {"latents_mean": [1.0]}, "latents_mean is .* expected 16 numbers"),
        ("vae/config.json", {"scale_factor_temporal": "4"}, "scale_factor_temporal is '4'"),
        ("text_encoder/config.json", {"d_model": 57}, r"text_encoder \(.*\) has d_model 57; .* needs 56 \(text_dim\)"),
        ("scheduler/scheduler_config.json", {"prediction_type": "epsilon"}, "expected 'flow_prediction'"),
    ],
)
def test_folders_whose_parts_do_not_fit_are_refused_before_loading(
    folder: Path, tmp_path: Path, file: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Pipeline.open(damaged(folder, tmp_path, file, **changes))


def test_a_network_that_reads_frames_in_a_folder_of_text_to_video_is_refused(
    reference_family: Callable[[str], Path], tmp_path: Path
) -> None:
    other = reference_family("wan21_i2v") / "model"
    with pytest.raises(CheckpointError, match=r"in_channels and out_channels are 36 and 16; .* needs 16 and 16"):
        Pipeline.open(damaged(other, tmp_path, "model_index.json", _class_name="WanPipeline"))


@pytest.mark.parametrize("family", ["wan22_t2v_a14b", "wan22_i2v_a14b"])
def test_a_second_expert_without_a_boundary_is_refused(
    family: str, reference_family: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = damaged(reference_family(family) / "model", tmp_path, "model_index.json", boundary_ratio=None)
    with pytest.raises(CheckpointError, match=r"lists transformer_2 but no boundary_ratio.*0\.875 for text, 0\.9 for"):
        Pipeline.open(folder)
    alone = damaged(folder, tmp_path / "alone", "model_index.json", transformer_2=[None, None])
    assert Pipeline.open(alone).family.key.value.startswith("wan2.1")


def test_a_video_that_is_not_finite_is_an_error(plain: Pipeline, tmp_path: Path) -> None:
    broken = damaged(plain.checkpoint.path, tmp_path, "vae/config.json")
    file = broken / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["decoder.conv_out.weight"][:] = float("inf")
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match="decode: the autoencoder gave NaN or infinity"):
        video(Pipeline.from_models(broken), runtime_config=runtime(output_type="decoded"))
