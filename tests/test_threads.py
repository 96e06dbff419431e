"""What the number of threads changes: the last digits between two numbers, nothing at the same one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kdit import Pipeline, RuntimeConfig, SampleConfig
from kdit.cli.verify.compare import relative_error


@pytest.fixture
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads_restored")
def test_the_number_of_threads_changes_only_the_last_digits(reference_family: Callable[[str], Path]) -> None:
    pipeline = Pipeline.from_models(reference_family("flux_dev") / "model")

    def latents(threads: int) -> Tensor:
        torch.set_num_threads(threads)
        assert torch.get_num_threads() == threads
        result = pipeline.generate(
            ["a red fox", "two boats"],
            sample_config=SampleConfig(steps=3, guidance_scale=3.5, cfg_scale=2.0, max_sequence_length=128),
            runtime_config=RuntimeConfig(seed=4, size=(256, 192)),
        )
        return result.latents

    one, two, again = latents(1), latents(2), latents(2)
    assert relative_error(two, one) <= 1e-4
    assert torch.equal(two, again)
