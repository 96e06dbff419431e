"""Enumerations that name models, tensors, pipelines and node types, and the lazy table of families."""

from kdit.keys.families import FAMILIES, FamilyEntry, family_of_model, family_of_pipeline
from kdit.keys.model_key import ModelKey, ModelKind
from kdit.keys.node_type import InferNodeType, IONodeType
from kdit.keys.pipeline_key import PipelineKey
from kdit.keys.run_id import MAIN, RunId
from kdit.keys.tensor_key import TensorKey

__all__ = [
    "FAMILIES",
    "MAIN",
    "FamilyEntry",
    "IONodeType",
    "InferNodeType",
    "ModelKey",
    "ModelKind",
    "PipelineKey",
    "RunId",
    "TensorKey",
    "family_of_model",
    "family_of_pipeline",
]
