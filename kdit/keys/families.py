"""The one table that names families: which module to import for a key, and nothing imported yet."""

from __future__ import annotations

from typing import NamedTuple

from kdit.errors import RegistryError
from kdit.keys.model_key import ModelKey
from kdit.keys.pipeline_key import PipelineKey


class FamilyEntry(NamedTuple):
    """What the keys of one family are, by the class names that its checkpoints state.

    ``kdit.models.<name>.network``, ``kdit.generators.defs.<name>``, ``kdit.pipelines.defs.<name>`` and
    ``kdit.pipelines.context_builders.<name>`` are the family's modules.
    """

    name: str
    title: str  # as its authors write it
    model_keys: tuple[ModelKey, ...]
    network_classes: tuple[str, ...]  # ``_class_name`` of transformer/config.json
    pipelines: dict[str, tuple[PipelineKey, ...]]
    """By ``_class_name`` of model_index.json: the pipelines that such a folder may need. Of several, the first whose
    ``FamilyPipeline.accepts`` agrees is taken."""


FAMILIES: dict[str, FamilyEntry] = {
    entry.name: entry
    for entry in (
        FamilyEntry(
            "flux",
            "FLUX.1",
            (ModelKey.FLUX1, ModelKey.FLUX1_FILL, ModelKey.FLUX1_CONTROL, ModelKey.FLUX1_KONTEXT),
            ("FluxTransformer2DModel",),
            {
                "FluxPipeline": (PipelineKey.FLUX1_T2I,),
                "FluxImg2ImgPipeline": (PipelineKey.FLUX1_T2I,),
                "FluxFillPipeline": (PipelineKey.FLUX1_FILL,),
                "FluxControlPipeline": (PipelineKey.FLUX1_CONTROL,),
                "FluxKontextPipeline": (PipelineKey.FLUX1_KONTEXT,),
            },
        ),
        FamilyEntry(
            "sd3",
            "Stable Diffusion 3",
            (ModelKey.SD3,),
            ("SD3Transformer2DModel",),
            {
                "StableDiffusion3Pipeline": (PipelineKey.SD3_T2I,),
                "StableDiffusion3Img2ImgPipeline": (PipelineKey.SD3_T2I,),
            },
        ),
        FamilyEntry(
            "wan",
            "Wan",
            (
                ModelKey.Wan2_1_T2V,
                ModelKey.Wan2_1_I2V,
                ModelKey.Wan2_2_T2V_14B,
                ModelKey.Wan2_2_T2V_14B_LOW,
                ModelKey.Wan2_2_I2V_14B,
                ModelKey.Wan2_2_I2V_14B_LOW,
                ModelKey.Wan2_2_TI2V_5B,
            ),
            ("WanTransformer3DModel",),
            {
                "WanPipeline": (PipelineKey.WAN2_2_TI2V_5B, PipelineKey.WAN2_2_T2V_14B, PipelineKey.WAN2_1_T2V),
                "WanImageToVideoPipeline": (
                    PipelineKey.WAN2_2_TI2V_5B,
                    PipelineKey.WAN2_2_I2V_14B,
                    PipelineKey.WAN2_1_I2V,
                ),
            },
        ),
    )
}


def family_of_model(key: ModelKey) -> FamilyEntry:
    """The family whose network ``key`` names."""
    for entry in FAMILIES.values():
        if key in entry.model_keys:
            return entry
    raise RegistryError(f"{key} is not the network of a family; known: {', '.join(FAMILIES)}")


def family_of_pipeline(key: PipelineKey) -> FamilyEntry:
    """The family whose pipeline ``key`` names."""
    for entry in FAMILIES.values():
        if any(key in keys for keys in entry.pipelines.values()):
            return entry
    raise RegistryError(f"{key} belongs to no family; known: {', '.join(FAMILIES)}")
