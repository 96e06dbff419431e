"""FLUX.1: second prompts and the calls of its two text encoders."""

from __future__ import annotations

from dataclasses import dataclass

from kdit.engine.engine import Engine
from kdit.errors import InputError
from kdit.keys import ModelKey
from kdit.models.checkpoint import Checkpoint
from kdit.nodes.infer.text_encode import EncoderCall
from kdit.pipelines.context_builder import ContextBuilder
from kdit.pipelines.extra_inputs import ExtraInputs
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_defaults import PipelineDefaults
from kdit.pipelines.prompts import per_sample


@dataclass(frozen=True, kw_only=True)
class FluxExtraInputs(ExtraInputs):
    """Other text for T5; CLIP reads the prompt. None: both read the prompt."""

    prompt_2: str | list[str] | None = None
    negative_prompt_2: str | list[str] | None = None


class FluxContextBuilder(ContextBuilder):
    """T5 reads up to ``max_sequence_length`` tokens, CLIP as many as it has positions."""

    def __init__(self, pipeline_def: PipelineDef, checkpoint: Checkpoint) -> None:
        super().__init__(pipeline_def, checkpoint)
        self._extra = FluxExtraInputs()

    def prepare_generate_inputs(
        self,
        base_inputs: PipelineGenerateInputs,
        extra_inputs: ExtraInputs | None,
        *,
        default_settings: PipelineDefaults,
        engine: Engine,
        vae_model_key: ModelKey | None,
    ) -> None:
        """Take the second prompts."""
        if extra_inputs is None:
            return
        if not isinstance(extra_inputs, FluxExtraInputs):
            raise InputError(f"FLUX.1 takes FluxExtraInputs, got {type(extra_inputs).__name__}")
        if extra_inputs.negative_prompt_2 is not None and base_inputs.negative_prompts is None:
            raise InputError("negative_prompt_2 needs classifier-free guidance: set cfg_scale above 1")
        self._extra = extra_inputs

    def encoder_calls(self, inputs: PipelineGenerateInputs) -> tuple[EncoderCall, ...]:
        """T5 hidden states, then CLIP's pooled state."""
        max_length, on_overflow = inputs.sample_config.max_sequence_length, inputs.sample_config.on_long_prompt
        assert max_length is not None
        t5_texts = _second(self._extra.prompt_2, inputs.prompts, "prompt_2")
        t5_negative = inputs.negative_prompts
        if t5_negative is not None:
            t5_negative = _second(self._extra.negative_prompt_2, t5_negative, "negative_prompt_2")
        return (
            EncoderCall(
                model=ModelKey.T5TextEncoder,
                texts=t5_texts,
                negative_texts=t5_negative,
                max_length=max_length,
                output="last_hidden_state",
                on_overflow=on_overflow,
            ),
            EncoderCall(
                model=ModelKey.CLIPTextEncoder,
                texts=inputs.prompts,
                negative_texts=inputs.negative_prompts,
                max_length=None,
                output="pooler_output",
            ),
        )


def _second(given: str | list[str] | None, texts: tuple[str, ...], name: str) -> tuple[str, ...]:
    return texts if given is None else per_sample(given, len(texts), name)
