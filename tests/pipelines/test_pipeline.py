"""Pipeline.generate: prompts, seeds, sizes, feeds, callbacks, cancellation, failures."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image
from torch import nn

from kdit import (
    Cancelled,
    CancelToken,
    CheckpointError,
    ConfigError,
    ExecuteConfig,
    FirstBlockCacheConfig,
    FuseKernelConfig,
    InputError,
    NonFiniteError,
    OutputError,
    ParallelConfig,
    PinError,
    Pipeline,
    QuantizeConfig,
    RuntimeConfig,
    SampleConfig,
    StepReport,
    TensorKey,
    UnsupportedOptionError,
)
from kdit.keys import IONodeType, ModelKey
from kdit.models.model_pool_key import ModelPoolKey
from kdit.pipelines.context_builders.flux import FluxExtraInputs
from kdit.pipelines.extra_inputs import ExtraInputs
from kdit.pipelines.result import GenerateResult
from tests.models.fill import distance

SMALL = SampleConfig(steps=2, max_sequence_length=12)
CFG = SampleConfig(steps=2, max_sequence_length=12, cfg_scale=2.0)


def make(pipe: Pipeline, prompt: str | list[str] = "a red fox", **changes: object) -> GenerateResult:
    arguments: dict[str, object] = dict(sample_config=SMALL, runtime_config=RuntimeConfig(seed=3, size=(32, 48)))
    return pipe.generate(prompt, **{**arguments, **changes})  # type: ignore[arg-type]


def runtime(**changes: object) -> RuntimeConfig:
    return RuntimeConfig(**{"seed": 3, "size": (32, 48), **changes})  # type: ignore[arg-type]


# ---- prompts, seeds, sizes


def test_one_prompt_gives_one_picture(dev: Pipeline) -> None:
    result = make(dev)
    assert [image.size for image in result.images] == [(32, 48)]
    assert result.pixels is not None and result.pixels.shape == (1, 48, 32, 3)
    assert result.latents.shape == (1, 6, 16) and result.seeds == (3,)
    assert {"text_encode", "prepare", "denoise", "vae_decode", "total"} <= result.timings.keys()
    assert result.notices == ()


def test_repeating_a_request_repeats_its_bits(dev: Pipeline) -> None:
    assert torch.equal(make(dev).latents, make(dev).latents)


def test_a_list_of_prompts_gives_each_its_own_seed(dev: Pipeline) -> None:
    both = make(dev, ["a red fox", "two boats"])
    assert both.seeds == (3, 4)
    for i, prompt in enumerate(["a red fox", "two boats"]):
        alone = make(dev, prompt, runtime_config=runtime(seed=3 + i))
        assert distance(both.latents[i : i + 1], alone.latents) < 1e-6


def test_batches_can_be_bit_equal(dev_folder: Path) -> None:
    pipe = Pipeline.from_models(dev_folder, execute_config=ExecuteConfig(batch_invariant=True))
    both = make(pipe, ["a red fox", "two boats"], sample_config=CFG)
    alone = make(pipe, "two boats", sample_config=CFG, runtime_config=runtime(seed=4))
    assert torch.equal(both.latents[1:], alone.latents)
    assert both.pixels is not None and alone.pixels is not None and torch.equal(both.pixels[1:], alone.pixels)
    inline = Pipeline.from_models(dev_folder, execute_config=ExecuteConfig(batch_invariant=True, modulation="inline"))
    assert torch.equal(make(inline, ["a red fox", "two boats"], sample_config=CFG).latents, both.latents)


def test_seed_0_is_a_seed(dev: Pipeline) -> None:
    zero = make(dev, runtime_config=runtime(seed=0))
    assert zero.seeds == (0,) and zero.settings["seeds"] == [0]
    assert torch.equal(zero.latents, make(dev, runtime_config=runtime(seed=0)).latents)
    assert distance(make(dev).latents, zero.latents) > 0.1


def test_without_a_seed_one_is_drawn_and_told(dev: Pipeline) -> None:
    first, second = (make(dev, runtime_config=runtime(seed=None)) for _ in range(2))
    assert first.seeds != second.seeds
    assert torch.equal(make(dev, runtime_config=runtime(seed=first.seeds[0])).latents, first.latents)


def test_a_tuple_gives_each_sample_a_seed(dev: Pipeline) -> None:
    result = make(dev, ["a", "b"], runtime_config=runtime(seed=(9, 9)))
    assert result.seeds == (9, 9)
    with pytest.raises(InputError, match="1 seeds for 2 prompts"):
        make(dev, ["a", "b"], runtime_config=runtime(seed=(9,)))


@pytest.mark.parametrize("prompt", ["", "かわいい 😄 ō", "a (red) bow, ((a:1.2)) [b] \\(c\\)", "\n\t "])
def test_any_text_is_a_prompt(dev: Pipeline, prompt: str) -> None:
    assert torch.isfinite(make(dev, prompt).latents).all()


def test_a_long_prompt_is_cut_with_a_notice_per_encoder_or_refused(
    dev: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "fox " * 600
    with caplog.at_level(logging.WARNING, logger="kdit"):
        cut = make(dev, prompt)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == len(cut.notices) == 2 and "T5TextEncoder, which takes 12" in lines[0]
    assert "CLIPTextEncoder, which takes 77" in lines[1] and cut.notices[1] in lines[1]
    # CLIP reads on beyond T5's 12 tokens, but not beyond 77
    assert torch.equal(cut.latents, make(dev, "fox " * 300).latents)
    assert not torch.equal(cut.latents, make(dev, "fox " * 9).latents)
    with pytest.raises(InputError, match="T5TextEncoder, which takes 12"):
        make(dev, prompt, sample_config=SampleConfig(steps=2, max_sequence_length=12, on_long_prompt="reject"))


@pytest.mark.parametrize(("prompt", "told"), [([], "empty list"), (["a", 3], r"prompt\[1\] must be a string, got int")])
def test_what_is_no_prompt_is_refused(dev: Pipeline, prompt: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        make(dev, prompt)


@pytest.mark.parametrize(("size", "nearest"), [((17, 31), "16x32"), ((1, 1), "16x16"), ((1920, 1080), "1920x1088")])
def test_a_size_off_the_grid_is_refused_with_the_nearest(dev: Pipeline, size: tuple[int, int], nearest: str) -> None:
    with pytest.raises(InputError, match=f"multiples of 16; nearest: {nearest}"):
        make(dev, runtime_config=runtime(size=size))


def test_a_picture_has_one_frame(dev: Pipeline) -> None:
    with pytest.raises(InputError, match="frame_num is 5"):
        make(dev, runtime_config=runtime(frame_num=5))


def test_defaults_are_the_models_own(dev: Pipeline, schnell: Pipeline) -> None:
    assert (dev.defaults.steps, dev.defaults.guidance_scale) == (28, 3.5)
    assert (schnell.defaults.steps, schnell.defaults.guidance_scale) == (4, None)
    settings = make(schnell, sample_config=SampleConfig(max_sequence_length=12)).settings
    assert (settings["steps"], settings["guidance_scale"], settings["cfg_scale"]) == (4, None, 1.0)


# ---- guidance


def test_classifier_free_guidance_needs_a_scale_above_1(dev: Pipeline) -> None:
    plain = make(dev)
    unused = make(dev, prompt_negative="blurry")
    assert torch.equal(plain.latents, unused.latents)
    assert len(unused.notices) == 1 and "prompt_negative has no effect" in unused.notices[0]
    empty = make(dev, sample_config=CFG)
    assert torch.equal(empty.latents, make(dev, sample_config=CFG, prompt_negative="").latents)
    assert distance(plain.latents, empty.latents) > 1e-3
    assert distance(make(dev, sample_config=CFG, prompt_negative="blurry").latents, empty.latents) > 1e-3
    assert empty.settings["negative_prompt"] == ""


def test_negative_prompts_match_the_prompts(dev: Pipeline) -> None:
    with pytest.raises(InputError, match="prompt_negative has 2 entries for 1 prompts"):
        make(dev, prompt_negative=["a", "b"], sample_config=CFG)
    each = make(dev, ["a", "b"], prompt_negative=["c", "d"], sample_config=CFG)
    alone = make(dev, "b", prompt_negative="d", sample_config=CFG, runtime_config=runtime(seed=4))
    assert distance(each.latents[1:], alone.latents) < 1e-6


def test_guidance_without_an_input_for_it_is_told(schnell: Pipeline) -> None:
    result = make(schnell, sample_config=SampleConfig(steps=2, max_sequence_length=12, guidance_scale=5.0))
    assert "guidance_scale 5 has no effect" in result.notices[0]
    assert torch.equal(result.latents, make(schnell).latents)
    with pytest.raises(UnsupportedOptionError, match="cfg_scale_2"):
        make(schnell, sample_config=SampleConfig(cfg_scale_2=2.0))


def test_a_second_prompt_goes_to_t5(dev: Pipeline) -> None:
    same = make(dev, extra_inputs=FluxExtraInputs(prompt_2="a red fox"))
    assert torch.equal(same.latents, make(dev).latents)
    assert distance(make(dev, extra_inputs=FluxExtraInputs(prompt_2="boats")).latents, same.latents) > 1e-3
    with pytest.raises(InputError, match="needs classifier-free guidance"):
        make(dev, extra_inputs=FluxExtraInputs(negative_prompt_2="x"))

    class Other(ExtraInputs):
        pass

    with pytest.raises(InputError, match="takes FluxExtraInputs, got Other"):
        make(dev, extra_inputs=Other())


def test_the_text_length_has_a_limit(dev: Pipeline) -> None:
    with pytest.raises(InputError, match="513, but this model takes at most 512"):
        make(dev, sample_config=SampleConfig(max_sequence_length=513))


# ---- feeds


def test_noise_is_fed_as_drawn_or_packed(dev: Pipeline) -> None:
    noise = torch.randn(1, 4, 6, 4, generator=torch.Generator().manual_seed(3))
    packed = dev.family.latents.to_public(noise)
    for fed in (noise, packed):
        result = make(dev, feeds={TensorKey.NOISE: fed}, runtime_config=runtime(seed=99))
        assert torch.equal(result.latents, make(dev).latents)
    with pytest.raises(InputError, match=r"\(1, 4, 6, 6\), expected \[B, 6, 16\] or \[B, 4, 6, 4\]"):
        make(dev, feeds={TensorKey.NOISE: torch.zeros(1, 4, 6, 6)})
    with pytest.raises(InputError, match="NOISE must be one tensor, got a list of 1"):
        make(dev, feeds={TensorKey.NOISE: [noise]})


def test_embeddings_can_come_from_outside(dev: Pipeline) -> None:
    arguments = dict(
        prompt_negative="blurry",
        sample_config=CFG,
        runtime_config=runtime(),
        hold=(TensorKey.POSITIVE, TensorKey.NEGATIVE),
    )
    with dev.start("a red fox", **arguments) as run:  # type: ignore[arg-type]
        held = {key: run.fetch(key) for key in (TensorKey.POSITIVE, TensorKey.NEGATIVE)}
    result = make(dev, "told, not read", feeds=held, sample_config=CFG)
    assert "text_encode" not in result.timings  # nobody needs the encoders any more
    assert torch.equal(result.latents, make(dev, prompt_negative="blurry", sample_config=CFG).latents)
    positive = {TensorKey.POSITIVE: held[TensorKey.POSITIVE]}
    assert torch.equal(make(dev, "x", feeds=positive).latents, make(dev).latents)
    with pytest.raises(InputError, match="POSITIVE holds 1 samples, expected 2"):
        make(dev, ["a", "b"], feeds=positive)


def test_an_unused_negative_feed_is_told(dev: Pipeline) -> None:
    result = make(dev, feeds={TensorKey.NEGATIVE: [torch.zeros(1, 12, 56), torch.zeros(1, 96)]})
    assert "NEGATIVE was fed" in result.notices[0] and torch.equal(result.latents, make(dev).latents)


def test_latents_can_be_decoded_alone(dev: Pipeline) -> None:
    made = make(dev)
    decoded = make(dev, feeds={TensorKey.LATENTS: made.latents})
    assert made.pixels is not None and decoded.pixels is not None
    assert torch.equal(decoded.pixels, made.pixels) and "denoise" not in decoded.timings
    assert (decoded.settings["steps"], decoded.settings["fed"]) == (0, ["latents"])
    assert (made.settings["steps"], made.settings["fed"]) == (2, [])


def test_a_feed_that_nobody_reads_is_refused(dev: Pipeline) -> None:
    with pytest.raises(InputError, match="START_IMG"):
        make(dev, feeds={TensorKey.START_IMG: torch.zeros(1)})


# ---- steps from outside


def test_a_callback_hears_of_every_step(dev: Pipeline) -> None:
    seen: list[StepReport] = []
    make(dev, callback=seen.append)
    assert [(r.step_index, r.num_steps) for r in seen] == [(0, 2), (1, 2)]


def test_a_failing_callback_ends_the_run(dev: Pipeline) -> None:
    def fail(report: StepReport) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        make(dev, callback=fail)


def test_cancelling_stops_between_two_steps(dev: Pipeline) -> None:
    token, seen = CancelToken(), list[StepReport]()

    def cancel(report: StepReport) -> None:
        seen.append(report)
        token.set()

    with pytest.raises(Cancelled, match="after step 1 of 2"):
        make(dev, callback=cancel, cancel=token)
    assert len(seen) == 1
    with pytest.raises(Cancelled, match="after step 0 of 2"):
        make(dev, cancel=token)


def test_three_runs_at_different_steps_share_their_forwards(dev: Pipeline) -> None:
    prompts = ["a red fox", "two boats", ""]
    settings = [
        dict(
            prompt_negative="blurry",
            sample_config=SampleConfig(steps=3 + i, max_sequence_length=12, cfg_scale=2.0 + i, guidance_scale=1.0 + i),
            runtime_config=runtime(seed=i),
        )
        for i in range(3)
    ]
    runs = []
    for prompt, arguments in zip(prompts, settings, strict=True):
        runs.append(dev.start(prompt, **arguments))  # type: ignore[arg-type]
        dev.step(runs)
    while left := [run for run in runs if run.steps_left]:
        dev.step(left)
    for run, prompt, arguments in zip(runs, prompts, settings, strict=True):
        assert distance(run.finish().latents, dev.generate(prompt, **arguments).latents) < 1e-6  # type: ignore[arg-type]


def test_a_run_shows_its_state_between_steps(dev: Pipeline) -> None:
    with dev.start("a", sample_config=CFG, runtime_config=runtime()) as run:
        assert run.steps_left == run.num_steps == 2 and "prediction" not in run.peek()
        dev.step([run])
        seen = run.peek()
        assert seen["latents"].shape == (1, 6, 16) and seen["prediction"].shape == (2, 1, 6, 16)
        assert run.steps_left == 1


def test_runs_that_cannot_share_a_step_are_refused(dev: Pipeline, schnell: Pipeline) -> None:
    with dev.start("a", sample_config=SMALL, runtime_config=runtime()) as a:
        for other in (
            dev.start("a", sample_config=SMALL, runtime_config=runtime(size=(32, 32))),
            dev.start("a", sample_config=CFG, runtime_config=runtime()),
            schnell.start("a", sample_config=SMALL, runtime_config=runtime()),
        ):
            with other, pytest.raises(InputError, match=r"cannot share a step|must come from one Pipeline"):
                dev.step([a, other])
        with pytest.raises(InputError, match="one at least"):
            dev.step([])
        dev.step([a])
        dev.step([a])
        with pytest.raises(InputError, match="steps left"):
            dev.step([a])


# ---- output


def test_latents_only_stops_before_the_autoencoder(dev: Pipeline) -> None:
    result = make(dev, runtime_config=runtime(output_type="latents"))
    assert result.images == [] and result.pixels is None and "vae_decode" not in result.timings
    assert torch.equal(result.latents, make(dev).latents)


def test_pictures_carry_their_settings(dev: Pipeline, tmp_path: Path) -> None:
    paths = tuple(str(tmp_path / f"{i}.png") for i in range(2))
    result = make(dev, ["かわいい 😄", "b"], sample_config=CFG, runtime_config=runtime(save_paths=paths))
    for i, path in enumerate(paths):
        with Image.open(path) as image:
            told = json.loads(image.text["kdit"])  # type: ignore[attr-defined]
            assert np.array_equal(np.asarray(image), np.asarray(result.images[i]))
        assert (told["prompt"], told["seed"], told["negative_prompt"]) == (["かわいい 😄", "b"][i], 3 + i, "")
        assert told["steps"] == 2 and told["model_hash"] == dev.model_hash and "seeds" not in told
    json.dumps(result.settings)


@pytest.mark.parametrize("name", ["missing/a.png", "a.jpg"])
def test_an_output_that_cannot_be_written_is_refused_first(dev: Pipeline, tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError):
        make(dev, runtime_config=runtime(save_paths=(str(tmp_path / name),)))
    with pytest.raises(InputError, match="1 save_paths for 2 samples"):
        make(dev, ["a", "b"], runtime_config=runtime(save_paths=(str(tmp_path / "a.png"),)))
    with pytest.raises(InputError, match="latents"):
        make(dev, runtime_config=runtime(save_paths=(str(tmp_path / "a.png"),), output_type="latents"))


# ---- options


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (ExecuteConfig(compile=True), "compile"),
        (ExecuteConfig(offload=True), "offload"),
        (ExecuteConfig(quant_config=QuantizeConfig(sage_attn_type="auto")), "sage_attn_type"),
        (ExecuteConfig(fuse_kernel_config=FuseKernelConfig(fuse_apply_rotary_emb=True)), "fuse_apply_rotary_emb"),
        (ExecuteConfig(cache_config=(FirstBlockCacheConfig(),)), "FirstBlockCacheConfig"),
    ],
)
def test_an_option_the_family_lacks_is_refused_before_loading(
    dev_folder: Path, tmp_path: Path, config: ExecuteConfig, option: str
) -> None:
    (tmp_path / "model_index.json").write_text((dev_folder / "model_index.json").read_text())
    with pytest.raises(UnsupportedOptionError, match=rf"{option} is not supported by FLUX\.1; families .*: none yet"):
        Pipeline.from_models(tmp_path, execute_config=config)  # a folder without weights


def test_parallel_axes_and_request_caches_are_refused(dev: Pipeline, dev_folder: Path) -> None:
    with pytest.raises(UnsupportedOptionError, match="parallel axis tp"):
        Pipeline.from_models(dev_folder, parallel_config=ParallelConfig(tp=2))
    with pytest.raises(UnsupportedOptionError, match="FirstBlockCacheConfig"):
        make(dev, cache_config=[FirstBlockCacheConfig()])
    with pytest.raises(ConfigError, match="tpu"):
        Pipeline.from_models(dev_folder, execute_config=ExecuteConfig(device="tpu"))


def test_bfloat16_gives_a_picture(dev_folder: Path) -> None:
    pipe = Pipeline.from_models(
        dev_folder, execute_config=ExecuteConfig(dtype="bfloat16", component_dtypes={"vae": "float32"})
    )
    result = make(pipe)
    assert result.latents.dtype == torch.bfloat16
    assert result.pixels is not None and torch.isfinite(result.pixels).all()


# ---- failures


def model_of(pipe: Pipeline, key: ModelKey) -> nn.Module:
    (loader,) = (n for n in pipe.pipeline_def.nodes if n.node_type is IONodeType.LOAD_MODEL and n.model_key is key)
    model = pipe.engine.executors[0]._model_pool.get(ModelPoolKey(loader.node_id, key))
    return getattr(model, "model", model)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (ModelKey.T5TextEncoder, "text encode: T5TextEncoder gave NaN"),
        (ModelKey.CLIPTextEncoder, "text encode: CLIPTextEncoder gave NaN"),
        (ModelKey.FLUX1, "denoise, step 1 of 2"),
        (ModelKey.VAE_KL, "decode: the autoencoder gave NaN"),
    ],
)
def test_nan_weights_name_their_stage_and_leave_no_file(
    dev_folder: Path, tmp_path: Path, key: ModelKey, told: str
) -> None:
    pipe = Pipeline.from_models(dev_folder)
    with torch.no_grad():
        for parameter in model_of(pipe, key).parameters():
            parameter.fill_(float("nan"))
    target = tmp_path / "a.png"
    with pytest.raises(NonFiniteError, match=told):
        make(pipe, runtime_config=runtime(save_paths=(str(target),)))
    assert list(tmp_path.iterdir()) == []
    assert pipe.engine.tensor_keys() == ()


def drain(pipe: Pipeline) -> None:
    """Let the engine free what dropped pipelines and runs of earlier tests left."""
    gc.collect()
    pipe.engine.tensor_keys()


def test_a_closed_pipeline_gives_its_models_back(dev: Pipeline, dev_folder: Path) -> None:
    pool = dev.engine.executors[0]._model_pool
    drain(dev)
    before = pool.keys()
    with Pipeline.from_models(dev_folder) as pipe:
        assert len(pool.keys()) == len(before) + 4
        made = make(pipe).latents
    assert pool.keys() == before
    with pytest.raises(ConfigError, match="is closed"):
        make(pipe)
    assert torch.equal(make(dev).latents, made)


def test_a_model_that_fails_to_load_takes_the_others_along(
    dev: Pipeline, dev_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = dev.engine.executors[0]._model_pool
    drain(dev)
    before = pool.keys()

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("kdit.nodes.io.load_model.load_vae", fail)
    with pytest.raises(MemoryError):
        Pipeline.from_models(dev_folder)
    assert pool.keys() == before


def test_a_request_is_checked_before_weights_are_loaded(dev: Pipeline, dev_folder: Path) -> None:
    drain(dev)
    before = dev.engine.executors[0]._model_pool.keys()
    pipe = Pipeline.open(dev_folder)
    with pytest.raises(InputError, match="multiples of 16"):
        pipe.request("a", runtime_config=runtime(size=(17, 31)))
    request = pipe.request("a red fox", sample_config=SMALL, runtime_config=runtime())
    assert pipe.engine.executors[0]._model_pool.keys() == before
    with pytest.raises(PinError, match="no model"):
        pipe.run(request)
    pipe.load_models()
    assert torch.equal(pipe.run(request).latents, make(dev).latents)
    with pipe.begin(request, hold=(TensorKey.POSITIVE,)) as run:
        assert len(run.fetch(TensorKey.POSITIVE)) == 2
    pipe.close()


def test_a_dropped_pipeline_gives_its_models_back(dev: Pipeline, dev_folder: Path) -> None:
    drain(dev)
    executor = dev.engine.executors[0]
    models, nodes = executor._model_pool.keys(), set(executor._node_cache)
    pipe = Pipeline.from_models(dev_folder)
    make(pipe, feeds={TensorKey.NOISE: torch.zeros(1, 6, 16)})
    make(pipe, feeds={TensorKey.NOISE: torch.ones(1, 6, 16)})
    assert len(executor._node_cache) == len(nodes) + 4 + 6 + 1  # loaders, graph, one feed node for both calls
    del pipe
    drain(dev)
    assert executor._model_pool.keys() == models and set(executor._node_cache) == nodes


def test_a_dropped_run_frees_its_state(dev: Pipeline) -> None:
    drain(dev)
    runs = [dev.start("a", sample_config=SMALL, runtime_config=runtime(), hold=(TensorKey.POSITIVE,)) for _ in range(3)]
    assert len(dev.engine.executors[0]._open_states) == len(runs)
    del runs
    drain(dev)
    assert not dev.engine.executors[0]._open_states and dev.engine.tensor_keys() == ()


def test_a_run_keeps_its_pipeline_alive(dev: Pipeline, dev_folder: Path) -> None:
    run = Pipeline.from_models(dev_folder).start("a red fox", sample_config=SMALL, runtime_config=runtime())
    drain(dev)
    while run.steps_left:
        Pipeline.step([run])
    assert torch.equal(run.finish().latents, make(dev).latents)


def test_a_run_is_finished_once_and_only_at_its_end(dev: Pipeline) -> None:
    run = dev.start("a red fox", sample_config=SMALL, runtime_config=runtime())
    with pytest.raises(InputError, match="2 of 2 steps are left"):
        run.finish()
    dev.step([run])
    dev.step([run])
    assert torch.equal(run.finish().latents, make(dev).latents)
    with pytest.raises(InputError, match="is over"):
        run.finish()
    with pytest.raises(InputError, match="steps left"):
        dev.step([run])
    with pytest.raises(InputError, match="list of runs"):
        dev.step(run)  # type: ignore[arg-type]


NOISE_SHAPE = (1, 4, 6, 4)


@pytest.mark.parametrize(
    ("feeds", "told"),
    [
        ({"NOISE": torch.zeros(NOISE_SHAPE)}, "keys are TensorKey members, got 'NOISE'"),
        ({TensorKey.NOISE: np.zeros(NOISE_SHAPE)}, "must be a tensor or a list of tensors, got ndarray"),
        ({TensorKey.NOISE: None}, "got NoneType"),
        (
            {TensorKey.NOISE: torch.zeros(NOISE_SHAPE, dtype=torch.int64)},
            "dense floating-point values, got torch.int64",
        ),
        ({TensorKey.NOISE: torch.zeros(NOISE_SHAPE, device="meta")}, "on meta"),
        ({TensorKey.NOISE: torch.full(NOISE_SHAPE, float("nan"))}, "NOISE holds NaN"),
        ({TensorKey.NOISE: torch.zeros(2, 4, 6, 4)}, "NOISE holds 2 samples, expected 1"),
        ({TensorKey.LATENTS: torch.zeros(2, 6, 16)}, "LATENTS holds 2 samples, expected 1"),
        ({TensorKey.BASE_LATENT: torch.ones(NOISE_SHAPE)}, "takes only its shape"),
        ({TensorKey.AUX_LATENT: torch.zeros(1)}, r"FLUX\.1 takes no AUX_LATENT"),
        ({TensorKey.VACE_CONTEXT: torch.zeros(1)}, r"FLUX\.1 takes no VACE_CONTEXT"),
        ({TensorKey.POSITIVE: [torch.zeros(1, 12, 57), torch.zeros(1, 96)]}, r"\[B, L, 56\].*\(1, 12, 57\)"),
        ({TensorKey.POSITIVE: torch.zeros(1, 12, 56)}, "CLIP pooled"),
    ],
)
def test_a_feed_that_would_be_ignored_or_cannot_be_used_is_refused(
    dev: Pipeline, feeds: dict[TensorKey, torch.Tensor], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        make(dev, feeds=feeds)


def test_branches_that_share_a_forward_must_agree(dev: Pipeline) -> None:
    negative = {TensorKey.NEGATIVE: [torch.zeros(1, 11, 56), torch.zeros(1, 96)]}
    with pytest.raises(InputError, match=r"POSITIVE and NEGATIVE differ in txt: \(1, 12, 56\) and \(1, 11, 56\)"):
        make(dev, feeds=negative, sample_config=CFG)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (dict(prompt=None), "prompt must be a string or a list of strings, got NoneType"),
        (dict(prompt={"a": 1}), "got dict"),
        (dict(prompt="a\ud83d"), "not valid Unicode"),
        (dict(prompt_negative=4), "prompt_negative must be a string"),
        (dict(sample_config={"steps": 2}), "expected a SampleConfig, got dict"),
        (dict(runtime_config={"seed": 2}), "expected a RuntimeConfig, got dict"),
        (dict(extra_inputs="x"), "expected a ExtraInputs, got str"),
        (dict(callback=3), "callback must be a function"),
        (dict(cancel=True), "cancel must be a CancelToken"),
        (
            dict(runtime_config=runtime(seed=2**63 - 1), prompt=["a", "b"]),
            "seed 9223372036854775807 is too large for 2",
        ),
        (
            dict(runtime_config=runtime(size=(16 * 10**6, 16 * 10**6))),
            "needs at least .* GiB beside the weights; cpu has",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_are_told(dev: Pipeline, arguments: dict[str, object], told: str) -> None:
    prompt = arguments.pop("prompt", "a")
    with pytest.raises(InputError, match=told):
        make(dev, prompt, **arguments)  # type: ignore[arg-type]


def test_settings_that_nothing_reads_are_refused(dev: Pipeline, dev_folder: Path) -> None:
    for config, told in (
        (ExecuteConfig(component_dtypes={"vaee": "float32"}), "names 'vaee'; .* has .*vae"),
        (ExecuteConfig(device="cuda:7"), "device is cuda:7, the given engine runs on cpu"),
    ):
        with pytest.raises(ConfigError, match=told):
            Pipeline.open(dev_folder, execute_config=config, engine=dev.engine)
    with pytest.raises(InputError, match="expected a ExecuteConfig, got dict"):
        Pipeline.open(dev_folder, execute_config={"dtype": "float32"})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="from_models takes a folder"):
        Pipeline.open(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [("a.png", "a.png"), ("a.png", "./a.png")])
def test_pictures_do_not_overwrite_each_other(dev: Pipeline, tmp_path: Path, names: tuple[str, str]) -> None:
    paths = tuple(f"{tmp_path}/{name}" for name in names)
    with pytest.raises(InputError, match="save_paths must differ"):
        make(dev, ["a", "b"], runtime_config=runtime(save_paths=paths))


def damaged(dev_folder: Path, folder: Path, file: str, **changes: object) -> Path:
    """The checkpoint with changed entries in one of its JSON files."""
    for item in dev_folder.rglob("*"):
        if item.is_file():
            target = folder / item.relative_to(dev_folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(item)
    text = json.loads((folder / file).read_text())
    (folder / file).unlink()
    (folder / file).write_text(json.dumps({**text, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"_class_name": "NopeScheduler"}, "'NopeScheduler' is no scheduler"),
        ({"_class_name": "DDIMScheduler"}, "DDIMScheduler takes no sigmas"),
        ({"stochastic_sampling": True}, "stochastic_sampling"),
        ({"num_train_timesteps": -4}, "FlowMatchEulerDiscreteScheduler cannot be made"),
    ],
)
def test_a_scheduler_that_cannot_be_used_is_refused_before_loading(
    dev_folder: Path, tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        Pipeline.open(damaged(dev_folder, tmp_path, "scheduler/scheduler_config.json", **changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"scaling_factor": "x"}, "scaling_factor must be a number, got 'x'"),
        ({"block_out_channels": []}, "block_out_channels must be a list"),
        ({"latent_channels": None}, "latent_channels must be a whole number"),
    ],
)
def test_an_autoencoder_that_cannot_be_used_is_refused_before_loading(
    dev_folder: Path, tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        Pipeline.open(damaged(dev_folder, tmp_path, "vae/config.json", **changes)).request("a")


def test_a_schedule_that_cannot_be_made_is_refused_before_loading(dev_folder: Path, tmp_path: Path) -> None:
    folder = damaged(dev_folder, tmp_path, "scheduler/scheduler_config.json", shift_terminal=0.02)
    pipe = Pipeline.open(folder)
    pipe.request("a", sample_config=SMALL)
    with pytest.raises(InputError, match=r"1 steps for latents .*FlowMatchEulerDiscreteScheduler"):
        pipe.request("a", sample_config=SampleConfig(steps=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheduler",
    [
        {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": True},
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True, "shift": 1.0},
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "use_karras_sigmas": True},
    ],
    ids=["unipc", "sparse-config", "karras"],
)
def test_other_schedulers_sample_as_in_diffusers(
    dev_folder: Path, tmp_path: Path, scheduler: dict[str, object]
) -> None:
    folder = damaged(dev_folder, tmp_path, "model_index.json", scheduler=["diffusers", scheduler["_class_name"]])
    (folder / "scheduler/scheduler_config.json").unlink()
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
    reference = FluxPipeline.from_pretrained(str(folder), dtype=torch.float32)
    reference.set_progress_bar_config(disable=True)
    expected = reference(
        "a red fox",
        num_inference_steps=4,
        guidance_scale=3.5,
        height=48,
        width=32,
        max_sequence_length=12,
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
    ).images
    with Pipeline.from_models(folder) as pipe:
        got = make(pipe, sample_config=SampleConfig(steps=4, guidance_scale=3.5, max_sequence_length=12))
        again = make(pipe, sample_config=SampleConfig(steps=4, guidance_scale=3.5, max_sequence_length=12))
    assert distance(got.latents, expected) < 1e-5 and torch.equal(got.latents, again.latents)


def test_clip_reads_as_many_tokens_as_its_tokenizer_states(dev: Pipeline, dev_folder: Path, tmp_path: Path) -> None:
    folder = damaged(dev_folder, tmp_path, "tokenizer/tokenizer_config.json", model_max_length=16)
    with Pipeline.from_models(folder) as pipe:
        result = make(pipe, "a red fox and a blue boat " * 4)
    assert "CLIPTextEncoder, which takes 16" in result.notices[-1]
    assert distance(result.latents, make(dev, "a red fox and a blue boat " * 4).latents) > 1e-3
