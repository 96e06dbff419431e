"""Runs step by step: callbacks, cancelling, sharing a forward, failing, and freeing what they held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from kdit import (
    Cancelled,
    CancelToken,
    InputError,
    NonFiniteError,
    Pipeline,
    SampleConfig,
    StepReport,
    TensorKey,
)
from kdit.keys import IONodeType, ModelKey
from kdit.models.model_pool_key import ModelPoolKey
from tests.models.fill import distance
from tests.pipelines.small import CFG, SMALL, drain, make, runtime, start


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
        runs.append(start(dev, prompt, **arguments))  # type: ignore[arg-type]
        dev.step(runs)
    while left := [run for run in runs if run.steps_left]:
        dev.step(left)
    for run, prompt, arguments in zip(runs, prompts, settings, strict=True):
        assert distance(run.finish().latents, dev.generate(prompt, **arguments).latents) < 1e-6  # type: ignore[arg-type]


def test_a_run_shows_its_state_between_steps(dev: Pipeline) -> None:
    with start(dev, "a", sample_config=CFG, runtime_config=runtime()) as run:
        assert run.steps_left == run.num_steps == 2 and "prediction" not in run.peek()
        dev.step([run])
        seen = run.peek()
        assert seen["latents"].shape == (1, 6, 16) and seen["prediction"].shape == (2, 1, 6, 16)
        assert run.steps_left == 1


def test_runs_that_cannot_share_a_step_are_refused(dev: Pipeline, schnell: Pipeline) -> None:
    with start(dev, "a", sample_config=SMALL, runtime_config=runtime()) as a:
        for other in (
            start(dev, "a", sample_config=SMALL, runtime_config=runtime(size=(32, 32))),
            start(dev, "a", sample_config=CFG, runtime_config=runtime()),
            start(schnell, "a", sample_config=SMALL, runtime_config=runtime()),
        ):
            with other, pytest.raises(InputError, match=r"cannot share a step|must come from one Pipeline"):
                dev.step([a, other])
        with pytest.raises(InputError, match="one run at least"):
            dev.step([])
        dev.step([a])
        dev.step([a])
        with pytest.raises(InputError, match="steps left"):
            dev.step([a])


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


def test_a_dropped_run_frees_its_state(dev: Pipeline) -> None:
    drain(dev)
    runs = [
        start(dev, "a", sample_config=SMALL, runtime_config=runtime(), hold=(TensorKey.POSITIVE,)) for _ in range(3)
    ]
    assert len(dev.engine.executors[0]._open_states) == len(runs)
    del runs
    drain(dev)
    assert not dev.engine.executors[0]._open_states and dev.engine.tensor_keys() == ()


def test_a_run_keeps_its_pipeline_alive(dev: Pipeline, dev_folder: Path) -> None:
    run = start(Pipeline.from_models(dev_folder), "a red fox", sample_config=SMALL, runtime_config=runtime())
    drain(dev)
    while run.steps_left:
        Pipeline.step([run])
    assert torch.equal(run.finish().latents, make(dev).latents)


def test_a_run_is_finished_once_and_only_at_its_end(dev: Pipeline) -> None:
    run = start(dev, "a red fox", sample_config=SMALL, runtime_config=runtime())
    with pytest.raises(InputError, match="2 of 2 steps are left"):
        run.finish()
    dev.step([run])
    dev.step([run])
    assert torch.equal(run.finish().latents, make(dev).latents)
    with pytest.raises(InputError, match="is over"):
        run.finish()
    with pytest.raises(InputError, match="steps left"):
        dev.step([run])
    with pytest.raises(InputError, match="expected list or tuple"):
        dev.step(run)  # type: ignore[arg-type]


def test_a_request_can_run_again_whatever_was_done_to_its_first_result(dev: Pipeline) -> None:
    request = dev.request("a red fox", sample_config=SMALL, runtime_config=runtime())
    first = dev.run(request)
    first.settings["size"].clear()  # type: ignore[attr-defined]
    first.settings["prompt"] = "changed"
    again = dev.run(request)
    assert torch.equal(again.latents, first.latents)
    assert (again.settings["prompt"], again.settings["size"]) == ("a red fox", [32, 48])
