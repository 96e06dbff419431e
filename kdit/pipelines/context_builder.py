"""ContextBuilder: gives each node of a graph its context. One instance serves one request."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Literal

from kdit.engine.engine import Engine
from kdit.errors import InputError
from kdit.generators.generator_context import SkipLayers
from kdit.keys import InferNodeType, IONodeType, ModelKey, TensorKey
from kdit.models.checkpoint import Checkpoint
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.infer.text_encode import EncoderCall
from kdit.pipelines.dag import fed_key, prune, topo_sort
from kdit.pipelines.extra_inputs import ExtraInputs, files_of
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_defaults import PipelineDefaults

Kept = Literal["none", "mask", "all"]
OUTPUT_NODES = (IONodeType.FETCH_TENSOR, IONodeType.SAVE_IMAGE, IONodeType.SAVE_VIDEO)  # what a request is run for


class ContextBuilder(ABC):
    """Covers the nodes that all families share; a family adds its encoder calls and its own inputs."""

    def __init__(self, pipeline_def: PipelineDef, checkpoint: Checkpoint) -> None:
        self.pipeline_def = pipeline_def
        self.checkpoint = checkpoint

    @abstractmethod
    def prepare_generate_inputs(
        self,
        base_inputs: PipelineGenerateInputs,
        extra_inputs: ExtraInputs | None,
        *,
        default_settings: PipelineDefaults,
        engine: Engine,
        vae_model_key: ModelKey | None,
    ) -> None:
        """Check the family's own inputs and keep what ``build_context`` needs of them."""

    @abstractmethod
    def encoder_calls(self, inputs: PipelineGenerateInputs) -> tuple[EncoderCall, ...]:
        """What the text encoders read, in the order in which the family's TextHandler wants their outputs."""

    def image_paths(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> list[str]:
        """Files for a READ_IMAGE node; ``_find_downstream_pin`` tells several of them apart."""
        raise InputError(f"{node_def} reads an image, but this pipeline takes none")

    def image_kind(self, node_def: NodeDef) -> Literal["image", "mask"]:
        """Whether a READ_IMAGE node reads a mask: by the pin that its output goes to."""
        return "mask" if self._find_downstream_pin(node_def.node_id, TensorKey.IMAGE) is TensorKey.MASK else "image"

    def noise_draws(self, inputs: PipelineGenerateInputs) -> tuple[str, ...]:
        """Dtypes of what the reference draws from a sample's generator before the noise."""
        return ()

    def skip_layers(self, inputs: PipelineGenerateInputs) -> SkipLayers | None:
        """Skip-layer guidance, if the request asks for it."""
        return None

    def kept(self, inputs: PipelineGenerateInputs) -> Kept:
        """What COMPOSITE keeps of the original picture."""
        return "none"

    def notices(self, inputs: PipelineGenerateInputs) -> tuple[str, ...]:
        """What the family's own inputs ask for and has no effect in this request."""
        return ()

    def expert_boundary(self) -> float | None:
        """Of two experts, the first runs at timesteps from here up."""
        return None

    def check_condition(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> bool:
        """Whether the node runs in this request."""
        decoded = inputs.runtime_config.output_type == "decoded"
        if node_def.node_type in (IONodeType.SAVE_IMAGE, IONodeType.SAVE_VIDEO):
            return decoded and inputs.runtime_config.save_paths is not None
        if node_def.node_type is IONodeType.FETCH_TENSOR:
            pixels = (self._find_upstream_pin(node_def.node_id, key) for key in (TensorKey.IMAGE, TensorKey.VIDEO))
            return decoded or not any(pixels)
        return True

    def active_nodes(self, inputs: PipelineGenerateInputs) -> list[NodeDef]:
        """The nodes that run in this request, in order; models are loaded already."""
        graph = self.pipeline_def
        sinks = [n for n in graph.nodes if n.node_type in OUTPUT_NODES and self.check_condition(n, inputs)]
        return [
            n
            for n in topo_sort(prune(graph, sinks))
            if n.node_type is not IONodeType.LOAD_MODEL and self.check_condition(n, inputs)
        ]

    def check_feeds(self, inputs: PipelineGenerateInputs) -> None:
        """Refuse a fed tensor that no node of this request reads: it would be lost without a word."""
        active = {node_def.node_id: node_def for node_def in self.active_nodes(inputs)}
        for node_def in self.pipeline_def.nodes:
            if node_def.node_type is not IONodeType.FEED_TENSOR:
                continue
            readers = [active.get(edge.dst.node_id) for edge in self.pipeline_def.edges_from(node_def)]
            key = fed_key(node_def, self.pipeline_def.edges)
            if not any(reader is not None and self._reads(reader, key, inputs) for reader in readers):
                raise InputError(f"feeds: nothing reads {key.name} in this request; leave it out")

    def _reads(self, node_def: NodeDef, key: TensorKey, inputs: PipelineGenerateInputs) -> bool:
        if node_def.node_type is not InferNodeType.COMPOSITE:
            return True
        kept = self.kept(inputs)
        return (key is not TensorKey.MASK or kept == "mask") and (key is not TensorKey.START_IMG or kept != "none")

    def build_context(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> NodeContext:
        """The context of one node of this request."""
        return NodeContext(
            prompt=list(inputs.prompts),
            negative_prompt=None if inputs.negative_prompts is None else list(inputs.negative_prompts),
            sample_config=inputs.sample_config,
            runtime_config=inputs.runtime_config,
            execute_config=inputs.execute_config,
            cache_config=inputs.cache_config,
            metadata=self._metadata(node_def, inputs),
        )

    def _metadata(self, node_def: NodeDef, inputs: PipelineGenerateInputs) -> dict[str, object]:
        match node_def.node_type:
            case InferNodeType.TEXT_ENCODE:
                return {"calls": self.encoder_calls(inputs)}
            case InferNodeType.VAE_COMPUTE_SHAPE:
                return {"num_samples": inputs.num_samples}
            case InferNodeType.VAE_ENCODE_SPATIAL:
                return {"seeds": inputs.seeds}
            case InferNodeType.VAE_DECODE:
                cut = inputs.output_size != inputs.runtime_config.size
                return {"output_size": inputs.output_size if cut else None}
            case InferNodeType.COMPOSITE:
                cut = inputs.output_size != inputs.runtime_config.size
                return {"keep": self.kept(inputs), "output_size": inputs.output_size if cut else None}
            case InferNodeType.GENERATE:
                return {
                    "seeds": inputs.seeds,
                    "scheduler_config": self.checkpoint.scheduler_config(),
                    "earlier_draws": self.noise_draws(inputs),
                    "expert_boundary": self.expert_boundary(),
                    "skip_layers": self.skip_layers(inputs),
                    "rows_per_forward": inputs.rows_per_forward,
                }
            case IONodeType.READ_IMAGE:
                return {"img_paths": self.image_paths(node_def, inputs), "kind": self.image_kind(node_def)}
            case IONodeType.SAVE_IMAGE:
                return self._save_metadata(inputs)
            case IONodeType.SAVE_VIDEO:
                return {**self._save_metadata(inputs), "fps": str(inputs.fps)}
            case IONodeType.FEED_TENSOR:
                return {"key": fed_key(node_def, self.pipeline_def.edges)}
            case _:
                return {}

    def _save_metadata(self, inputs: PipelineGenerateInputs) -> dict[str, object]:
        config = inputs.runtime_config
        paths, text = list(config.save_paths or ()), self.file_texts(inputs)
        return {"paths": paths, "text": text, "options": config.file_options}

    def file_texts(self, inputs: PipelineGenerateInputs) -> list[dict[str, str]]:
        """What each sample's file carries beside its pixels."""
        software = f"kdit {inputs.settings['kdit_version']}"
        settings = (self.file_settings(inputs, i) for i in range(inputs.num_samples))
        return [{"kdit": json.dumps(own, ensure_ascii=False), "Software": software} for own in settings]

    def vae_dtype(self, inputs: PipelineGenerateInputs, folder: str = "vae") -> str:
        """The dtype in which the autoencoder computes, and the reference draws the noise of its posterior."""
        return inputs.execute_config.component_dtypes.get(folder, inputs.execute_config.dtype)

    def file_settings(self, inputs: PipelineGenerateInputs, index: int) -> dict[str, object]:
        """Settings of one sample, as its file carries them."""
        own = {**inputs.settings, "prompt": inputs.prompts[index], "seed": inputs.seeds[index]}
        if inputs.negative_prompts is not None:
            own["negative_prompt"] = inputs.negative_prompts[index]
        if inputs.extra_inputs is not None:
            own |= self._own_inputs(inputs, inputs.extra_inputs, index)
        own.pop("seeds", None)
        return own

    def _own_inputs(self, inputs: PipelineGenerateInputs, extra: ExtraInputs, index: int) -> dict[str, object]:
        """The extra inputs and files of one sample."""
        fields = extra.of_sample(index, inputs.num_samples)
        hashes = inputs.settings["input_files"]
        assert isinstance(hashes, dict)
        files = files_of(fields)
        own: dict[str, object] = {"extra_inputs": fields, "input_files": {path: hashes[path] for path in files}}
        media = inputs.settings.get("media")
        if isinstance(media, dict) and fields != extra.given() and len(media.get("images", ())) == inputs.num_samples:
            own["media"] = {**media, "images": [media["images"][index]]}
        return own

    def _is_fed(self, key: TensorKey) -> bool:
        """Whether the caller feeds this tensor."""
        feeds = (node_def for node_def in self.pipeline_def.nodes if node_def.node_type is IONodeType.FEED_TENSOR)
        return any(fed_key(node_def, self.pipeline_def.edges) is key for node_def in feeds)

    def _find_downstream_pin(self, node_id: int, pin: PinDef) -> PinDef | None:
        """The pin that the output ``pin`` of the node is connected to."""
        for edge in self.pipeline_def.edges:
            if edge.src.node_id == node_id and edge.src.pin is pin:
                return edge.dst.pin
        return None

    def _find_upstream_pin(self, node_id: int, pin: PinDef) -> PinDef | None:
        """The pin that the input ``pin`` of the node is connected to."""
        for edge in self.pipeline_def.edges:
            if edge.dst.node_id == node_id and edge.dst.pin is pin:
                return edge.src.pin
        return None
