"""FLUX.1: the inputs of its pipelines, the calls of its two text encoders, and the images' nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kdit.config.checks import is_whole
from kdit.engine.engine import Engine
from kdit.errors import InputError
from kdit.keys import InferNodeType, IONodeType, ModelKey, TensorKey
from kdit.models.checkpoint import Checkpoint
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.infer.text_encode import EncoderCall
from kdit.pipelines.context_builder import ContextBuilder, Kept
from kdit.pipelines.extra_inputs import ExtraInputs
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.pipelines.image_sizes import MEGAPIXEL
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_defaults import PipelineDefaults
from kdit.pipelines.prompts import other_texts, per_sample

Paths = str | list[str] | None
IMAGE_NODES = (IONodeType.READ_IMAGE, InferNodeType.VAE_ENCODE_SPATIAL, InferNodeType.VAE_ENCODE_IMAGES)

# The sizes that FLUX.1 Kontext was trained with, (width, height).
KONTEXT_SIZES = (
    *((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104)),
    (1024, 1024),
    *((1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688), (1568, 672)),
)


@dataclass(frozen=True, kw_only=True)
class FluxTextInputs(ExtraInputs):
    """Other text for T5; CLIP reads the prompt. None: both read the prompt."""

    prompt_2: str | list[str] | None = None
    negative_prompt_2: str | list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class FluxExtraInputs(FluxTextInputs):
    """Text to image, or changes the image by ``SampleConfig.strength``. A list of images: one per prompt."""

    image_path: Paths = None


@dataclass(frozen=True, kw_only=True)
class FluxFillExtraInputs(FluxTextInputs):
    """The white part of the mask is repainted. Lists: one per prompt."""

    image_path: Paths = None
    mask_path: Paths = None
    mask_binarize: bool = True  # the network gets a mask of black and white; else the greys as they are
    composite: bool = False  # what the mask leaves black is the image's own to the bit, greys are blended


@dataclass(frozen=True, kw_only=True)
class FluxControlExtraInputs(FluxTextInputs):
    """A depth or edge image. A list: one per prompt."""

    control_path: Paths = None


@dataclass(frozen=True, kw_only=True)
class FluxKontextExtraInputs(FluxTextInputs):
    """References, of any sizes: one or a list for every prompt, or a list of lists, one for each prompt.

    Without ``size``, the first one's shape decides it, at ``max_area`` pixels.
    """

    image_paths: str | list[str] | list[list[str]] | None = None
    auto_resize: bool = True  # references are encoded at the nearest size that the model was trained with
    max_area: int = MEGAPIXEL

    def __post_init__(self) -> None:
        if not is_whole(self.max_area, low=1):
            raise InputError(f"`extra_inputs.max_area` must be a number of pixels, got {self.max_area!r}")

    def of_prompts(self, num_samples: int) -> tuple[tuple[str, ...], ...]:
        """The references of each prompt. Raises InputError."""
        given = self.image_paths
        if given is None or isinstance(given, str):
            return (self.files(),) * num_samples
        shared = tuple(path for path in given if isinstance(path, str))
        if len(shared) == len(given):
            return (shared,) * num_samples
        own = tuple(tuple(paths) for paths in given if not isinstance(paths, str))
        if shared or len(own) != num_samples:
            raise InputError(
                "`extra_inputs.image_paths` must be files for every prompt, or one list of files for each of "
                f"{num_samples} prompts; got {len(shared)} files and {len(own)} lists"
            )
        return own


class FluxContextBuilder(ContextBuilder):
    """Text to image and image to image. T5 reads up to ``max_sequence_length`` tokens, CLIP as many as it can."""

    takes: ClassVar[type[FluxTextInputs]] = FluxExtraInputs

    def __init__(self, pipeline_def: PipelineDef, checkpoint: Checkpoint) -> None:
        super().__init__(pipeline_def, checkpoint)
        self._extra = self.takes()
        self._paths: dict[TensorKey, tuple[str, ...]] = {}  # files of READ_IMAGE nodes, by what they hold

    def prepare_generate_inputs(
        self,
        base_inputs: PipelineGenerateInputs,
        extra_inputs: ExtraInputs | None,
        *,
        default_settings: PipelineDefaults,
        engine: Engine,
        vae_model_key: ModelKey | None,
    ) -> None:
        """Take second prompts and images."""
        extra = self.takes() if extra_inputs is None else extra_inputs
        if not isinstance(extra, self.takes):
            raise InputError(f"this pipeline takes {self.takes.__name__}, got {type(extra).__name__}")
        if extra.negative_prompt_2 is not None and base_inputs.negative_prompts is None:
            raise InputError("`extra_inputs.negative_prompt_2` needs classifier-free guidance: set `cfg_scale` above 1")
        self._extra, self._size_multiple = extra, default_settings.size_multiple
        self.take_images(base_inputs)
        self.encoder_calls(base_inputs)  # refuses lists of another length
        if self._is_fed(TensorKey.POSTERIOR_NOISE) and not self.samples_posterior(base_inputs):
            raise InputError("POSTERIOR_NOISE is fed, but this request samples no posterior")

    def take_images(self, inputs: PipelineGenerateInputs) -> None:
        """Check the images and note their files. Raises InputError."""
        assert isinstance(self._extra, FluxExtraInputs)
        if self._extra.image_path is not None:
            self._refuse_fed(TensorKey.BASE_LATENT, "image_path")
            self.note_paths(TensorKey.IMAGE, self._extra.image_path, "image_path", inputs)

    def note_paths(self, key: TensorKey, given: Paths, name: str, inputs: PipelineGenerateInputs) -> None:
        """Files of the READ_IMAGE node for ``key``: one for all samples, or one for each. Raises InputError."""
        if given is None:
            what = {"image_path": "an image", "mask_path": "a mask"}.get(name, "a control image")
            raise InputError(f"this pipeline needs {what}: give `{self.takes.__name__}.{name}`")
        paths = per_sample(given, inputs.num_samples, f"extra_inputs.{name}")
        self._paths[key] = paths[:1] if isinstance(given, str) else paths

    def _refuse_fed(self, key: TensorKey, *fields: str) -> None:
        if self._is_fed(key):
            names = " or ".join(f"`extra_inputs.{name}`" for name in fields)
            raise InputError(f"{key.name} is fed, so {names} would not be read; give one of them")

    def image_paths(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> list[str]:
        """See ContextBuilder."""
        return list(self._paths[TensorKey.MASK if self.image_kind(node_def) == "mask" else TensorKey.IMAGE])

    def check_condition(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> bool:
        """Nodes for images run if there are any."""
        if node_def.node_type is IONodeType.READ_IMAGE and self.image_kind(node_def) == "mask":
            return TensorKey.MASK in self._paths
        if node_def.node_type in IMAGE_NODES and TensorKey.IMAGE not in self._paths:
            return False
        return super().check_condition(node_def, inputs)

    def noise_draws(self, inputs: PipelineGenerateInputs) -> tuple[str, ...]:
        """The posterior of an image that is changed. For fed latents the reference draws none."""
        return (self.vae_dtype(inputs),) if TensorKey.IMAGE in self._paths else ()

    def samples_posterior(self, inputs: PipelineGenerateInputs) -> bool:
        """Whether any node of the request needs POSTERIOR_NOISE."""
        return TensorKey.IMAGE in self._paths

    def kept(self, inputs: PipelineGenerateInputs) -> Kept:
        """All of the image if no step changes it."""
        return "all" if inputs.sample_config.strength == 0 and TensorKey.IMAGE in self._paths else "none"

    def encoder_calls(self, inputs: PipelineGenerateInputs) -> tuple[EncoderCall, ...]:
        """T5 hidden states, then CLIP's pooled state."""
        max_length, on_overflow = inputs.sample_config.max_sequence_length, inputs.sample_config.on_long_prompt
        assert max_length is not None
        t5_texts = other_texts(self._extra.prompt_2, inputs.prompts, "extra_inputs.prompt_2")
        t5_negative = inputs.negative_prompts
        if t5_negative is not None:
            t5_negative = other_texts(self._extra.negative_prompt_2, t5_negative, "extra_inputs.negative_prompt_2")
        return (
            EncoderCall(
                model=ModelKey.T5TextEncoder,
                texts=t5_texts,
                negative_texts=t5_negative,
                max_length=max_length,
                outputs=("last_hidden_state",),
                on_overflow=on_overflow,
            ),
            EncoderCall(
                model=ModelKey.CLIPTextEncoder,
                texts=inputs.prompts,
                negative_texts=inputs.negative_prompts,
                max_length=None,
                outputs=("pooler_output",),
            ),
        )


class FluxFillContextBuilder(FluxContextBuilder):
    """Draws of each sample: posterior of the image, noise, posterior of the image under its mask."""

    takes = FluxFillExtraInputs

    def take_images(self, inputs: PipelineGenerateInputs) -> None:
        """See FluxContextBuilder."""
        assert isinstance(self._extra, FluxFillExtraInputs)
        extra, begins = self._extra, self._begins_at_image(inputs) and not self._is_fed(TensorKey.BASE_LATENT)
        if self._is_fed(TensorKey.AUX_LATENT) and not extra.composite and not begins:
            if extra.files():
                self._refuse_fed(TensorKey.AUX_LATENT, "image_path", "mask_path")
            return
        self.note_paths(TensorKey.IMAGE, extra.image_path, "image_path", inputs)
        if extra.mask_path is not None:
            self._refuse_fed(TensorKey.MASK, "mask_path")
        if not self._is_fed(TensorKey.MASK):
            self.note_paths(TensorKey.MASK, extra.mask_path, "mask_path", inputs)
        if self._is_fed(TensorKey.POSTERIOR_NOISE) and begins:
            raise InputError("POSTERIOR_NOISE is fed, but with a `strength` below 1 two posteriors are sampled")

    def check_condition(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> bool:
        """At strength 1 nothing of the image is left in the noise."""
        if node_def.node_type is InferNodeType.VAE_ENCODE_SPATIAL and not self._begins_at_image(inputs):
            return False
        return super().check_condition(node_def, inputs)

    def noise_draws(self, inputs: PipelineGenerateInputs) -> tuple[str, ...]:
        """The posterior of the image, at any strength."""
        return (self.vae_dtype(inputs),)

    def _begins_at_image(self, inputs: PipelineGenerateInputs) -> bool:
        return inputs.sample_config.strength is not None and inputs.sample_config.strength < 1

    def _metadata(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> dict[str, object]:
        if node_def.node_type is InferNodeType.VAE_ENCODE_IMAGES:
            assert isinstance(self._extra, FluxFillExtraInputs)
            execute = inputs.execute_config
            noise_dtype = execute.component_dtypes.get("transformer", execute.dtype)
            return {
                "seeds": inputs.seeds,
                "earlier_draws": (*self.noise_draws(inputs), noise_dtype),
                "binarize_mask": self._extra.mask_binarize,
            }
        return super()._metadata(node_def, inputs)

    def kept(self, inputs: PipelineGenerateInputs) -> Kept:
        """What the mask leaves black, if asked for."""
        assert isinstance(self._extra, FluxFillExtraInputs)
        whole = super().kept(inputs)
        return "mask" if self._extra.composite and whole == "none" else whole


class FluxControlContextBuilder(FluxContextBuilder):
    """Draws of each sample: posterior of the control image, noise."""

    takes = FluxControlExtraInputs

    def take_images(self, inputs: PipelineGenerateInputs) -> None:
        """See FluxContextBuilder."""
        assert isinstance(self._extra, FluxControlExtraInputs)
        if self._is_fed(TensorKey.AUX_LATENT):
            if self._extra.control_path is not None:
                self._refuse_fed(TensorKey.AUX_LATENT, "control_path")
            return
        self.note_paths(TensorKey.IMAGE, self._extra.control_path, "control_path", inputs)

    def noise_draws(self, inputs: PipelineGenerateInputs) -> tuple[str, ...]:
        """The posterior of the control image."""
        return (self.vae_dtype(inputs),)

    def _metadata(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> dict[str, object]:
        if node_def.node_type is InferNodeType.VAE_ENCODE_IMAGES:
            return {"seeds": inputs.seeds}
        return super()._metadata(node_def, inputs)


class FluxKontextContextBuilder(FluxContextBuilder):
    """References are encoded once each, by the mode of their posteriors: nothing but the noise is drawn."""

    takes = FluxKontextExtraInputs

    def take_images(self, inputs: PipelineGenerateInputs) -> None:
        """See FluxContextBuilder."""
        assert isinstance(self._extra, FluxKontextExtraInputs)
        self._references = self._extra.of_prompts(inputs.num_samples)
        distinct = tuple(dict.fromkeys(path for own in self._references for path in own))
        if distinct:
            self._refuse_fed(TensorKey.AUX_LATENT, "image_paths")
            self._paths[TensorKey.IMAGE] = distinct

    def noise_draws(self, inputs: PipelineGenerateInputs) -> tuple[str, ...]:
        """None."""
        return ()

    def samples_posterior(self, inputs: PipelineGenerateInputs) -> bool:
        """Never."""
        return False

    def _metadata(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> dict[str, object]:
        assert isinstance(self._extra, FluxKontextExtraInputs)
        metadata = super()._metadata(node_def, inputs)
        if node_def.node_type is InferNodeType.VAE_ENCODE_IMAGES:
            sizes = KONTEXT_SIZES if self._extra.auto_resize else ()
            return {"preferred_sizes": sizes, "multiple": self._size_multiple}
        if node_def.node_type is InferNodeType.GENERATE and TensorKey.IMAGE in self._paths:
            files = self._paths[TensorKey.IMAGE]
            return {**metadata, "aux_of_samples": tuple(tuple(map(files.index, own)) for own in self._references)}
        return metadata
