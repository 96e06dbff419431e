"""refuse_long_prompts: what TEXT_ENCODE would refuse, before any weight is loaded. Called by Pipeline."""

from __future__ import annotations

from kdit.keys import InferNodeType
from kdit.models.checkpoint import Checkpoint
from kdit.models.text_encoder import load_tokenizer
from kdit.nodes.infer.text_encode import check_length, max_length
from kdit.pipelines.context_builder import ContextBuilder
from kdit.pipelines.family_pipeline import FamilyPipeline
from kdit.pipelines.generate_inputs import PipelineGenerateInputs


def refuse_long_prompts(
    builder: ContextBuilder, inputs: PipelineGenerateInputs, checkpoint: Checkpoint, family: FamilyPipeline
) -> None:
    """Raise InputError for a text with more tokens than its encoder takes, if the request wants such refused.

    Needs the tokenizers alone. Nothing is counted where no text is encoded.
    """
    if all(node_def.node_type is not InferNodeType.TEXT_ENCODE for node_def in builder.active_nodes(inputs)):
        return
    for call in builder.encoder_calls(inputs):
        if call.on_overflow != "reject":
            continue
        component = family.components[call.model]
        assert component.tokenizer is not None, "a text encoder has a tokenizer"
        tokenizer = load_tokenizer(checkpoint.component(component.tokenizer).path)
        positions = checkpoint.component(component.folder).config.get("max_position_embeddings")
        length = max_length(call, tokenizer, positions)
        for text in dict.fromkeys((*call.texts, *(call.negative_texts or ()))):
            check_length(tokenizer, call, text, length)
