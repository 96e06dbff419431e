"""The cycle collector is paused where models are loaded, and afterwards as it was."""

from __future__ import annotations

import gc
import threading

import pytest

from kdit.collector import collector_paused


def test_the_setting_is_as_before_after_success_and_failure() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(RuntimeError), collector_paused():
        raise RuntimeError
    assert gc.isenabled()


def test_a_program_that_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_overlapping_sections_of_threads_end_with_the_last() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled(), "the other thread is still inside"
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_loading_a_pipeline_runs_without_it_and_generating_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from kdit import Pipeline, RuntimeConfig, SampleConfig
    from kdit.nodes.io.load_model import ModelLoader

    seen: list[bool] = []
    run = ModelLoader.run

    def spy(self: ModelLoader, *args: object, **kwargs: object) -> object:
        seen.append(gc.isenabled())
        return run(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelLoader, "run", spy)
    pipeline = Pipeline.from_models("mini")
    assert seen and not any(seen)
    pipeline.generate(
        "a red heart",
        sample_config=SampleConfig(steps=1, cfg_scale=1.0),
        runtime_config=RuntimeConfig(size=(32, 32), seed=1),
        callback=lambda report: seen.append(gc.isenabled()),
    )
    assert seen[-1]
    pipeline.close()
