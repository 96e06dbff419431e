"""A single file makes the same picture as the folder whose weights it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kdit import Pipeline, RuntimeConfig, SampleConfig
from kdit.errors import CheckpointMissingError
from kdit.models.single_file.sources import Components
from tests.models.single_file import original_layout
from tests.models.single_file.files import WEIGHTS, network_tensors, write

Family = Callable[[str], Path]


def picture(path: Path, components: Components | None = None) -> bytes:
    with Pipeline.from_models(path, components=components) as pipe:
        result = pipe.generate(
            "a red fox",
            sample_config=SampleConfig(steps=2, cfg_scale=1.0),
            runtime_config=RuntimeConfig(seed=1, size=(64, 64)),
        )
    assert result.images is not None
    return result.images[0].tobytes()


@pytest.mark.parametrize(("name", "family"), [("flux_dev", "flux"), ("sd3_medium", "sd3")])
def test_the_same_picture(name: str, family: str, reference_family: Family, tmp_path: Path) -> None:
    model = reference_family(name) / "model"
    network = original_layout.WRITERS[family](network_tensors(model))
    path = write(tmp_path / "x.safetensors", network, "model.diffusion_model.")
    vae = write(tmp_path / "ae.safetensors", original_layout.vae(load_file(model / "vae" / WEIGHTS)))
    encoder = model / "text_encoder" / "model.safetensors"
    expected = picture(model)
    assert picture(path, model) == expected
    assert picture(path, {"base": model, "vae": vae, "text_encoder": encoder}) == expected
    assert picture(model, {"transformer": path}) == expected


def test_sd3_without_t5_only_when_asked_for(reference_family: Family, tmp_path: Path) -> None:
    model = reference_family("sd3_medium") / "model"
    tensors = network_tensors(model)
    path = write(tmp_path / "x.safetensors", original_layout.sd3(tensors))
    assert picture(path, {"base": model, "text_encoder_3": None}) != picture(path, model)
    # without a folder's config, norms of queries and keys have to show the width of heads
    names = [f"transformer_blocks.{i}.attn.norm_{n}.weight" for i in range(3) for n in ("q", "k", "added_q", "added_k")]
    bare = write(tmp_path / "y.safetensors", original_layout.sd3(tensors | {name: torch.ones(20) for name in names}))
    tokenizers: Components = {name: model / name for name in ("tokenizer", "tokenizer_2", "tokenizer_3")}
    with pytest.raises(CheckpointMissingError, match=r"lacks .*text_encoder_3"):
        Pipeline.open(bare, components=tokenizers)
