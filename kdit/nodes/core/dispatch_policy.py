"""NodeDispatchPolicy: on which ranks a node's inputs, work and outputs are. Read by the Executor."""

from __future__ import annotations

from enum import Enum

from kdit.config import ParallelConfig
from kdit.keys import InferNodeType, IONodeType
from kdit.nodes.core.node_def import NodeDef


class NodeDispatchPolicy(Enum):
    """Named input_execution_output. "R0" is rank 0 of the replica."""

    ALL_ALL_ALL = "all_all_all"  # every rank runs and writes its own outputs
    R0_R0_BCAST = "r0_r0_bcast"  # rank 0 runs, its outputs are broadcast
    ALL_R0_R0 = "all_r0_r0"  # rank 0 runs and keeps the outputs


_DEFAULTS: dict[InferNodeType | IONodeType, NodeDispatchPolicy] = {
    IONodeType.LOAD_MODEL: NodeDispatchPolicy.ALL_ALL_ALL,
    IONodeType.FEED_TENSOR: NodeDispatchPolicy.ALL_ALL_ALL,
    InferNodeType.GENERATE: NodeDispatchPolicy.ALL_ALL_ALL,
    IONodeType.READ_IMAGE: NodeDispatchPolicy.R0_R0_BCAST,
    InferNodeType.TEXT_ENCODE: NodeDispatchPolicy.R0_R0_BCAST,
    InferNodeType.IMAGE_ENCODE: NodeDispatchPolicy.R0_R0_BCAST,
    InferNodeType.VAE_COMPUTE_SHAPE: NodeDispatchPolicy.R0_R0_BCAST,
    InferNodeType.VAE_ENCODE_SPATIAL: NodeDispatchPolicy.R0_R0_BCAST,
    InferNodeType.VAE_ENCODE_IMAGES: NodeDispatchPolicy.R0_R0_BCAST,
    InferNodeType.VACE_PREPROCESS: NodeDispatchPolicy.R0_R0_BCAST,
    InferNodeType.VAE_DECODE: NodeDispatchPolicy.ALL_R0_R0,
    InferNodeType.COMPOSITE: NodeDispatchPolicy.ALL_R0_R0,
    IONodeType.SAVE_VIDEO: NodeDispatchPolicy.ALL_R0_R0,
    IONodeType.SAVE_IMAGE: NodeDispatchPolicy.ALL_R0_R0,
    IONodeType.FETCH_TENSOR: NodeDispatchPolicy.ALL_R0_R0,
}

# VAE_COMPUTE_SHAPE is arithmetic: it gains nothing from more ranks
_VAE_NODES = frozenset({InferNodeType.VAE_ENCODE_SPATIAL, InferNodeType.VAE_ENCODE_IMAGES, InferNodeType.VAE_DECODE})


def dispatch_policy(node_def: NodeDef, parallel_config: ParallelConfig) -> NodeDispatchPolicy:
    """The policy of a node: its default, or all ranks where the configuration shares the node's work."""
    shares_text = node_def.node_type is InferNodeType.TEXT_ENCODE and parallel_config.text_encoder_tp > 1
    shares_vae = node_def.node_type in _VAE_NODES and parallel_config.vae > 1
    if shares_text or shares_vae:
        return NodeDispatchPolicy.ALL_ALL_ALL
    return _DEFAULTS[node_def.node_type]
