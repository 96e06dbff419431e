"""Wan: texts as UMT5 reads them, start and end pictures, the change between two experts."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import cast

from kdit.engine.engine import Engine
from kdit.errors import InputError
from kdit.keys import InferNodeType, IONodeType, ModelKey, PipelineKey, TensorKey
from kdit.models.checkpoint import Checkpoint
from kdit.models.video_latents import VideoVaeParams, latent_frames
from kdit.models.wan.config import WanParams
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.infer.text_encode import EncoderCall
from kdit.pipelines.context_builder import ContextBuilder
from kdit.pipelines.extra_inputs import ExtraInputs
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_defaults import PipelineDefaults
from kdit.pipelines.prompts import per_sample

BOUNDARY = "boundary_ratio"  # in model_index.json: the part of the schedule's times at which the experts change over
TRAIN_TIMESTEPS = 1000  # the scheduler's, where its config does not state them

Paths = str | list[str] | None


@dataclass(frozen=True, kw_only=True)
class WanI2VExtraInputs(ExtraInputs):
    """Pictures that the video begins and ends with: one for all samples, or a list with one for each."""

    start_img_path: Paths = None
    end_img_path: Paths = None


class WanContextBuilder(ContextBuilder):
    """Text to video: no inputs of its own."""

    def __init__(self, pipeline_def: PipelineDef, checkpoint: Checkpoint) -> None:
        super().__init__(pipeline_def, checkpoint)
        self.params = WanParams.from_config(checkpoint.component("transformer").config)

    def prepare_generate_inputs(
        self,
        base_inputs: PipelineGenerateInputs,
        extra_inputs: ExtraInputs | None,
        *,
        default_settings: PipelineDefaults,
        engine: Engine,
        vae_model_key: ModelKey | None,
    ) -> None:
        """Refuse a video that is longer than the network's positions."""
        vae = VideoVaeParams.from_config(self.checkpoint.component("vae").config)
        frames, patch = base_inputs.runtime_config.frame_num, self.params.patch_size[0]
        assert frames is not None
        most = ((self.params.max_grid * patch) - 1) * vae.temporal_factor + 1
        if frames > most:
            raise InputError(f"`frame_num` is {frames}: this model makes at most {most} frames")
        if latent_frames(frames, vae.temporal_factor) % patch:
            raise InputError(f"`frame_num` is {frames}: its latent frames must be a multiple of {patch} for this model")

    def encoder_calls(self, inputs: PipelineGenerateInputs) -> tuple[EncoderCall, ...]:
        """UMT5's states; those of padding are zero."""
        negatives = inputs.negative_prompts
        return (
            EncoderCall(
                model=ModelKey.UMT5TextEncoder,
                texts=tuple(map(clean_text, inputs.prompts)),
                negative_texts=None if negatives is None else tuple(map(clean_text, negatives)),
                max_length=inputs.sample_config.max_sequence_length,
                outputs=("last_hidden_state",),
                masked=True,
                on_overflow=inputs.sample_config.on_long_prompt,
            ),
        )

    def expert_boundary(self) -> float | None:
        """A part of the timesteps that the scheduler was trained with; None for a model of one network."""
        ratio = self.checkpoint.options.get(BOUNDARY)
        if ratio is None:
            return None
        trained = self.checkpoint.scheduler_config().get("num_train_timesteps", TRAIN_TIMESTEPS)
        return cast(float, ratio) * cast(int, trained)

    def _metadata(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> dict[str, object]:
        metadata = super()._metadata(node_def, inputs)
        if node_def.node_type is InferNodeType.VAE_DECODE:
            cut = inputs.output_frames != inputs.runtime_config.frame_num
            return {**metadata, "output_frames": inputs.output_frames if cut else None}
        return metadata


class WanI2VContextBuilder(WanContextBuilder):
    """Image to video; of 2.2 TI2V 5B, which takes a start picture and needs none."""

    def __init__(self, pipeline_def: PipelineDef, checkpoint: Checkpoint) -> None:
        super().__init__(pipeline_def, checkpoint)
        self._extra = WanI2VExtraInputs()
        self._first_frame_alone = pipeline_def.key is PipelineKey.WAN2_2_TI2V_5B
        nodes = {node_def.node_type for node_def in pipeline_def.nodes}
        self._has_image_encoder = InferNodeType.IMAGE_ENCODE in nodes
        self._needs_end = self._has_image_encoder and self.params.image_tokens is not None

    def prepare_generate_inputs(
        self,
        base_inputs: PipelineGenerateInputs,
        extra_inputs: ExtraInputs | None,
        *,
        default_settings: PipelineDefaults,
        engine: Engine,
        vae_model_key: ModelKey | None,
    ) -> None:
        """Check that the pictures are those that this model takes, and as many as there are samples."""
        super().prepare_generate_inputs(
            base_inputs, extra_inputs, default_settings=default_settings, engine=engine, vae_model_key=vae_model_key
        )
        if extra_inputs is not None:
            assert isinstance(extra_inputs, WanI2VExtraInputs)
            self._extra = extra_inputs
        extra, num_samples = self._extra, base_inputs.num_samples
        for name, given in (("start_img_path", extra.start_img_path), ("end_img_path", extra.end_img_path)):
            if given is not None:
                per_sample(given, num_samples, f"extra_inputs.{name}")
        if extra.end_img_path is not None:
            self._check_end(base_inputs)
        self._check_start()

    def _check_start(self) -> None:
        given = self._extra.start_img_path is not None
        frames_fed, tokens_fed = self._is_fed(TensorKey.BASE_LATENT), self._is_fed(TensorKey.AUX_LATENT)
        if given and frames_fed and (tokens_fed or not self._has_image_encoder):
            raise InputError("`extra_inputs.start_img_path` has no effect where BASE_LATENT is fed; give one of them")
        if given and not tokens_fed and self._needs_end and self._extra.end_img_path is None:
            raise InputError("this model makes a video between two images: give `extra_inputs.end_img_path` too")
        if given or self._first_frame_alone:
            return
        if not frames_fed:
            raise InputError(
                "this model makes a video from an image: give `extra_inputs.start_img_path`, or feed BASE_LATENT"
            )
        if self._has_image_encoder and not tokens_fed:
            raise InputError(
                "BASE_LATENT is fed, but this model also reads the image: give `extra_inputs.start_img_path`"
            )

    def _check_end(self, inputs: PipelineGenerateInputs) -> None:
        if self._first_frame_alone:
            raise InputError("`extra_inputs.end_img_path`: this model takes a start image alone")
        if self._extra.start_img_path is None:
            raise InputError("`extra_inputs.end_img_path` needs `extra_inputs.start_img_path`")
        if self._has_image_encoder and not self._needs_end:
            raise InputError("`extra_inputs.end_img_path`: this model was made for a start image alone")
        made, kept = inputs.runtime_config.frame_num, inputs.output_frames
        if made == 1:
            raise InputError("`extra_inputs.end_img_path`: a video of one frame cannot begin and end with two images")
        if made != kept:
            raise InputError(
                f"`extra_inputs.end_img_path`: of {made} frames that are made {kept} are kept, so the end would be lost"
            )

    def image_paths(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> list[str]:
        """Start or end: by the pin that the node leads to."""
        given = self._path_for(node_def)
        assert given is not None
        return [given] if isinstance(given, str) else list(given)

    def _path_for(self, node_def: NodeDef) -> Paths:
        pin = self._find_downstream_pin(node_def.node_id, TensorKey.IMAGE)
        assert pin in (TensorKey.START_IMG, TensorKey.END_IMG), pin
        return self._extra.start_img_path if pin is TensorKey.START_IMG else self._extra.end_img_path

    def check_condition(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> bool:
        """Pictures that are not given are not read, and without a first one none is encoded."""
        if node_def.node_type is IONodeType.READ_IMAGE:
            return self._path_for(node_def) is not None
        if node_def.node_type in (InferNodeType.VAE_ENCODE_SPATIAL, InferNodeType.IMAGE_ENCODE):
            return self._extra.start_img_path is not None
        return super().check_condition(node_def, inputs)

    def _metadata(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> dict[str, object]:
        match node_def.node_type:
            case InferNodeType.VAE_ENCODE_SPATIAL:
                return {"num_samples": inputs.num_samples, "first_frame_alone": self._first_frame_alone}
            case InferNodeType.IMAGE_ENCODE:
                return {"num_samples": inputs.num_samples}
            case _:
                return super()._metadata(node_def, inputs)


def clean_text(text: str) -> str:
    """As the reference cleans prompts: broken encodings mended, HTML entities read, white space collapsed."""
    import ftfy

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())
