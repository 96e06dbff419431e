"""Stable Diffusion 3: texts for its encoders, skip-layer guidance, an image to change."""

from __future__ import annotations

from dataclasses import dataclass

from kdit.config.checks import is_scale, is_whole
from kdit.engine.engine import Engine
from kdit.errors import InputError
from kdit.generators.generator_context import SkipLayers
from kdit.generators.scheduler import first_step
from kdit.keys import InferNodeType, IONodeType, ModelKey, TensorKey
from kdit.models.checkpoint import Checkpoint
from kdit.models.sd3.config import SD3Params
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.infer.text_encode import EncoderCall
from kdit.pipelines.context_builder import ContextBuilder, Kept
from kdit.pipelines.extra_inputs import ExtraInputs
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_defaults import PipelineDefaults
from kdit.pipelines.prompts import other_texts, per_sample


@dataclass(frozen=True, kw_only=True)
class SD3ExtraInputs(ExtraInputs):
    """Other texts for CLIP-G (``_2``) and T5 (``_3``), where None means that they read what CLIP-L reads; skip-layer
    guidance, off without ``skip_layers``; the image to change, one for all samples or a list with one for each.
    """

    prompt_2: str | list[str] | None = None
    prompt_3: str | list[str] | None = None
    negative_prompt_2: str | list[str] | None = None
    negative_prompt_3: str | list[str] | None = None
    skip_layers: tuple[int, ...] = ()  # indices of blocks; in 3.5 medium (7, 8, 9) was published
    skip_layer_scale: float = 2.8
    skip_layer_start: float = 0.01  # parts of the steps
    skip_layer_stop: float = 0.2
    image_path: str | list[str] | None = None

    def __post_init__(self) -> None:
        given: object = self.skip_layers
        if isinstance(given, list):  # as it comes from JSON; lists elsewhere have an entry per sample
            object.__setattr__(self, "skip_layers", tuple(given))


class SD3ContextBuilder(ContextBuilder):
    """T5 reads up to ``max_sequence_length`` tokens, the CLIPs as many as they have positions."""

    def __init__(self, pipeline_def: PipelineDef, checkpoint: Checkpoint) -> None:
        super().__init__(pipeline_def, checkpoint)
        self._extra = SD3ExtraInputs()

    def prepare_generate_inputs(
        self,
        base_inputs: PipelineGenerateInputs,
        extra_inputs: ExtraInputs | None,
        *,
        default_settings: PipelineDefaults,
        engine: Engine,
        vae_model_key: ModelKey | None,
    ) -> None:
        """Check the texts, the layers to skip and the image."""
        extra = SD3ExtraInputs() if extra_inputs is None else extra_inputs
        assert isinstance(extra, SD3ExtraInputs)
        self._extra = extra
        given = extra.given()
        if base_inputs.negative_prompts is None:
            for name in ("negative_prompt_2", "negative_prompt_3", "skip_layers"):
                if name in given:
                    raise InputError(f"`extra_inputs.{name}` needs classifier-free guidance: set `cfg_scale` above 1")
        if not self._has_t5:
            for name in ("prompt_3", "negative_prompt_3"):
                if name in given:
                    raise InputError(
                        f"`extra_inputs.{name}` is for T5, and this checkpoint has none (no text_encoder_3)"
                    )
        self._check_skip_layers(given)
        self.encoder_calls(base_inputs)  # refuses lists of another length
        if extra.image_path is not None:
            per_sample(extra.image_path, base_inputs.num_samples, "extra_inputs.image_path")
            if self._is_fed(TensorKey.BASE_LATENT):
                raise InputError(
                    "`extra_inputs.image_path` and fed BASE_LATENT are both the image to change; give one of them"
                )
        elif self._is_fed(TensorKey.POSTERIOR_NOISE):
            raise InputError("POSTERIOR_NOISE is fed, but there is no image whose posterior would be sampled with it")

    def encoder_calls(self, inputs: PipelineGenerateInputs) -> tuple[EncoderCall, ...]:
        """States and pooled state of CLIP-L and of CLIP-G, then T5's states."""
        extra, on_overflow = self._extra, inputs.sample_config.on_long_prompt
        negatives = inputs.negative_prompts
        second, third = (
            (
                other_texts(text, inputs.prompts, f"extra_inputs.prompt_{n}"),
                None if negatives is None else other_texts(negative, negatives, f"extra_inputs.negative_prompt_{n}"),
            )
            for n, text, negative in (
                (2, extra.prompt_2, extra.negative_prompt_2),
                (3, extra.prompt_3, extra.negative_prompt_3),
            )
        )
        clips = tuple(
            EncoderCall(
                model=model,
                texts=texts,
                negative_texts=negative_texts,
                max_length=None,
                outputs=("penultimate_hidden_state", "text_embeds"),
                on_overflow="cut" if self._has_t5 else on_overflow,  # what they cut, T5 still reads
            )
            for model, texts, negative_texts in (
                (ModelKey.CLIPTextEncoder, inputs.prompts, negatives),
                (ModelKey.CLIPTextEncoder2, *second),
            )
        )
        if not self._has_t5:
            return clips
        t5 = EncoderCall(
            model=ModelKey.T5TextEncoder,
            texts=third[0],
            negative_texts=third[1],
            max_length=inputs.sample_config.max_sequence_length,
            outputs=("last_hidden_state",),
            on_overflow=on_overflow,
        )
        return (*clips, t5)

    def skip_layers(self, inputs: PipelineGenerateInputs) -> SkipLayers | None:
        """As the extra inputs say."""
        extra = self._extra
        if not extra.skip_layers:
            return None
        return SkipLayers(
            layers=extra.skip_layers,
            scale=extra.skip_layer_scale,
            start=extra.skip_layer_start,
            stop=extra.skip_layer_stop,
        )

    def notices(self, inputs: PipelineGenerateInputs) -> tuple[str, ...]:
        """Skip-layer guidance may fall between two steps."""
        skip = self.skip_layers(inputs)
        steps, strength = inputs.sample_config.steps, inputs.sample_config.strength
        assert steps is not None
        run = steps - first_step(steps, strength)
        if skip is None or any(skip.is_active(i, run) for i in range(run)):
            return ()
        return (
            f"`extra_inputs.skip_layers` has no effect: none of the {run} steps, counted from 0, lies between parts "
            f"{skip.start:g} and {skip.stop:g} of them",
        )

    def noise_draws(self, inputs: PipelineGenerateInputs) -> tuple[str, ...]:
        """The posterior of an image that is encoded."""
        return () if self._extra.image_path is None else (self.vae_dtype(inputs),)

    def image_paths(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> list[str]:
        """The image to change."""
        given = self._extra.image_path
        assert given is not None
        return [given] if isinstance(given, str) else list(given)

    def check_condition(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> bool:
        """Without an image nothing is read and encoded."""
        if node_def.node_type in (IONodeType.READ_IMAGE, InferNodeType.VAE_ENCODE_SPATIAL):
            return self._extra.image_path is not None
        return super().check_condition(node_def, inputs)

    def kept(self, inputs: PipelineGenerateInputs) -> Kept:
        """With strength 0 the picture is the input itself, not what the autoencoder makes of it."""
        return "all" if self._extra.image_path is not None and inputs.sample_config.strength == 0 else "none"

    @property
    def _has_t5(self) -> bool:
        return any(node_def.model_key is ModelKey.T5TextEncoder for node_def in self.pipeline_def.nodes)

    def _check_skip_layers(self, given: dict[str, object]) -> None:
        extra = self._extra
        if not extra.skip_layers:
            for name in ("skip_layer_scale", "skip_layer_start", "skip_layer_stop"):
                if name in given:
                    raise InputError(f"`extra_inputs.{name}` has no effect without `extra_inputs.skip_layers`")
            return
        count = SD3Params.from_config(self.checkpoint.component("transformer").config).num_layers
        layers: object = extra.skip_layers
        if not isinstance(layers, tuple) or not all(is_whole(n, low=0, high=count - 1) for n in layers):
            raise InputError(f"`extra_inputs.skip_layers` must be whole numbers from 0 to {count - 1}, got {layers!r}")
        if not is_scale(extra.skip_layer_scale):
            scale = extra.skip_layer_scale
            raise InputError(f"`extra_inputs.skip_layer_scale` must be a finite number of at least 0, got {scale!r}")
        start, stop = extra.skip_layer_start, extra.skip_layer_stop
        if not (is_scale(start) and is_scale(stop) and start < stop <= 1):
            raise InputError(
                "`extra_inputs.skip_layer_start` and `extra_inputs.skip_layer_stop` must be parts of the steps, "
                f"0 <= start < stop <= 1, got {start!r} and {stop!r}"
            )
