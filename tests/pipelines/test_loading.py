"""Opening and loading a folder: options and settings that cannot be used, and giving models back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline

from kdit import (
    Cancelled,
    CancelToken,
    CheckpointError,
    ConfigError,
    ExecuteConfig,
    FirstBlockCacheConfig,
    FuseKernelConfig,
    InputError,
    ParallelConfig,
    Pipeline,
    QuantizeConfig,
    SampleConfig,
    TensorKey,
    UnsupportedOptionError,
)
from tests.models.fill import distance
from tests.pipelines.small import SMALL, damaged, drain, make, runtime


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


def test_settings_that_nothing_reads_are_refused(dev: Pipeline, dev_folder: Path) -> None:
    for config, told in (
        (ExecuteConfig(component_dtypes={"vaee": "float32"}), "names 'vaee'; .* has .*vae"),
        (ExecuteConfig(device="cuda:7"), "device` is cuda:7, the given engine runs on cpu"),
    ):
        with pytest.raises(ConfigError, match=told):
            Pipeline.open(dev_folder, execute_config=config, engine=dev.engine)
    with pytest.raises(InputError, match="expected ExecuteConfig, got dict"):
        Pipeline.open(dev_folder, execute_config={"dtype": "float32"})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="from_models takes a folder"):
        Pipeline.open(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_a_picture(dev: Pipeline, dev_folder: Path, dtype: str) -> None:
    pipe = Pipeline.from_models(
        dev_folder, execute_config=ExecuteConfig(dtype=dtype, component_dtypes={"vae": "float32"})
    )
    result = make(pipe)
    assert result.latents.dtype == getattr(torch, dtype)
    assert result.pixels is not None and torch.isfinite(result.pixels).all()


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


def test_a_dropped_pipeline_gives_its_models_back(dev: Pipeline, dev_folder: Path) -> None:
    drain(dev)
    executor = dev.engine.executors[0]
    models, nodes = executor._model_pool.keys(), set(executor._node_cache)
    pipe = Pipeline.from_models(dev_folder)
    make(pipe, feeds={TensorKey.NOISE: torch.zeros(1, 6, 16)})
    make(pipe, feeds={TensorKey.NOISE: torch.ones(1, 6, 16)})
    assert len(executor._node_cache) == len(nodes) + 4 + 7 + 1  # loaders, graph, one feed node for both calls
    del pipe
    drain(dev)
    assert executor._model_pool.keys() == models and set(executor._node_cache) == nodes


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
    with pytest.raises(InputError, match="not loaded yet; call load_models"):
        pipe.run(request)
    with pytest.raises(InputError, match="is run by the pipeline whose request"):
        dev.run(request)
    pipe.load_models()
    assert torch.equal(pipe.run(request).latents, make(dev).latents)
    with pipe.begin(request, hold=(TensorKey.POSITIVE,)) as run:
        assert len(run.fetch(TensorKey.POSITIVE)) == 2
    pipe.close()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"_class_name": "NopeScheduler"}, "'NopeScheduler' is no scheduler"),
        ({"_class_name": "DDIMScheduler"}, "DDIMScheduler takes no sigmas"),
        ({"stochastic_sampling": True}, "stochastic_sampling"),
        ({"_class_name": "EulerDiscreteScheduler"}, "prediction_type of EulerDiscreteScheduler is 'epsilon'"),
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


@pytest.mark.parametrize(
    ("file", "changes", "told"),
    [
        ("text_encoder", {"hidden_size": 8}, r"text_encoder \(.*\) has hidden_size 8; .*\(pooled_projection_dim\)"),
        ("text_encoder_2", {"d_model": 8}, r"text_encoder_2 \(.*\) has d_model 8; .*needs 56 \(joint_attention_dim\)"),
        ("vae", {"latent_channels": 5}, r"vae \(.*\) has latent_channels 5; the transformer needs 4"),
    ],
)
def test_parts_of_other_widths_are_refused_before_loading(
    dev_folder: Path, tmp_path: Path, file: str, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        Pipeline.open(damaged(dev_folder, tmp_path, f"{file}/config.json", **changes))


def test_an_encoder_of_another_width_as_a_file_is_refused_before_loading(dev_folder: Path, tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    sizes = dict(d_model=24, d_kv=6, d_ff=20, num_heads=4, num_layers=2, vocab_size=300)
    T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu")).save_pretrained(tmp_path)  # type: ignore[arg-type]
    for given in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"text_encoder_2 \(.*\) has d_model 24; the transformer needs 56"):
            Pipeline.open(dev_folder, components={"text_encoder_2": given})


def test_a_prompt_too_long_is_refused_before_loading(dev_folder: Path) -> None:
    pipe = Pipeline.open(dev_folder)
    strict = SampleConfig(steps=1, max_sequence_length=12, on_long_prompt="reject")
    with pytest.raises(InputError, match=r"prompt has \d+ tokens for T5TextEncoder, which takes 12"):
        pipe.request("fox " * 20, sample_config=strict)
    with pytest.raises(InputError, match="T5TextEncoder, which takes 12"):
        negative = SampleConfig(steps=1, max_sequence_length=12, on_long_prompt="reject", cfg_scale=2.0)
        pipe.request("fox", prompt_negative="fox " * 20, sample_config=negative)
    pipe.request("fox", sample_config=strict)
    pipe.request("fox " * 20, sample_config=SMALL)


def test_a_schedule_that_cannot_be_made_is_refused_before_loading(dev_folder: Path, tmp_path: Path) -> None:
    folder = damaged(dev_folder, tmp_path, "scheduler/scheduler_config.json", shift_terminal=0.02)
    pipe = Pipeline.open(folder)
    pipe.request("a", sample_config=SMALL)
    with pytest.raises(InputError, match=r"1 steps for latents .*FlowMatchEulerDiscreteScheduler .*not finite"):
        pipe.request("a", sample_config=SampleConfig(steps=1))


def test_a_scheduler_that_raises_over_its_settings_is_named(dev_folder: Path, tmp_path: Path) -> None:
    folder = damaged(dev_folder, tmp_path, "scheduler/scheduler_config.json", max_shift="x")
    with pytest.raises(InputError, match="FlowMatchEulerDiscreteScheduler of this checkpoint makes no schedule"):
        Pipeline.open(folder).request("a", sample_config=SMALL)


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


def test_a_network_that_does_not_fit_is_refused_before_the_encoders_are_loaded(
    dev_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("an encoder was loaded")

    monkeypatch.setattr("kdit.nodes.io.load_model.load_text_encoder", never)
    folder = damaged(dev_folder, tmp_path, "transformer/config.json", num_layers=3)
    with pytest.raises(CheckpointError, match="tensors are missing"):
        Pipeline.from_models(folder)


def test_loading_can_be_cancelled_and_tried_again(dev: Pipeline, dev_folder: Path) -> None:
    drain(dev)
    before, token = dev.engine.executors[0]._model_pool.keys(), CancelToken()
    token.set()
    with Pipeline.open(dev_folder) as pipe:
        with pytest.raises(Cancelled, match="while loading"):
            pipe.load_models(cancel=token)
        assert dev.engine.executors[0]._model_pool.keys() == before
        pipe.load_models()
        assert torch.equal(make(pipe).latents, make(dev).latents)
    with pytest.raises(ConfigError, match="is closed"):
        pipe.load_models()
