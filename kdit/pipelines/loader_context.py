"""loader_context: the context of a LOAD_MODEL node. Called by Pipeline before there is any request."""

from __future__ import annotations

from kdit.config import ExecuteConfig
from kdit.models.checkpoint import Checkpoint
from kdit.models.single_file.file_component import locator
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.pipelines.family_pipeline import FamilyPipeline


def loader_context(
    node_def: NodeDef, checkpoint: Checkpoint, pipeline: FamilyPipeline, execute_config: ExecuteConfig
) -> NodeContext:
    """Where the node's model lies, and in which dtype it is loaded."""
    assert node_def.model_key is not None
    component = pipeline.components[node_def.model_key]
    held = checkpoint.component(component.folder)
    tokenizer = None if component.tokenizer is None else str(checkpoint.component(component.tokenizer).path)
    metadata: dict[str, object] = {
        **locator(held),
        "tokenizer_path": tokenizer,
        "dtype": execute_config.component_dtypes.get(component.folder, execute_config.dtype),
    }
    return NodeContext(execute_config=execute_config, metadata=metadata)
