"""Prompts are plain text: what encoders read is what their tokenizers make of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kdit import Pipeline, RuntimeConfig, SampleConfig
from kdit.models.text_encoder import load_tokenizer
from kdit.nodes.infer.text_encode import TextEncodeNode, _Encoding

BRACKETS = ["a (red) bow", r"\(x\)", "((a:1.2))", "(a:", "[a]", "{a|b}", "<lora:a:1>"]


@pytest.mark.parametrize("family", ["flux_dev", "sd3_medium", "wan21_t2v"])
def test_brackets_are_no_weights(
    family: str, reference_family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TextEncodeNode.input_defs == []  # the text comes with the calls, and in no other way
    seen: list[tuple[Path, str, torch.Tensor]] = []
    original = _Encoding._tokens

    def spy(self: _Encoding, text: str) -> tuple[torch.Tensor, torch.Tensor]:
        found = original(self, text)
        seen.append((Path(self.encoder.tokenizer.name_or_path), text, found[0][found[1].bool()]))
        return found

    monkeypatch.setattr(_Encoding, "_tokens", spy)
    pipe = Pipeline.from_models(reference_family(family) / "model")
    video = pipe.family.output == "video"
    runtime = RuntimeConfig(seed=1, size=(32, 32), frame_num=1 if video else None, output_type="latents")
    pipe.generate(BRACKETS, sample_config=SampleConfig(steps=1, cfg_scale=1.0), runtime_config=runtime)
    folders = {folder for folder, _, _ in seen}
    assert len(folders) == {"flux_dev": 2, "sd3_medium": 3, "wan21_t2v": 1}[family]
    for folder in folders:
        tokenizer = load_tokenizer(folder)
        read = {text: ids.tolist() for place, text, ids in seen if place == folder}
        assert read == {text: tokenizer(text)["input_ids"] for text in BRACKETS}
