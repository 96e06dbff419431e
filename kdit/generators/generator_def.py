"""GeneratorDef: all that the final runner needs to know about a family."""

from __future__ import annotations

from dataclasses import dataclass

from kdit.generators.capabilities import Capabilities
from kdit.generators.handlers import DenoiseHandler, LatentHandler, TextHandler
from kdit.keys import ModelKey


@dataclass(frozen=True, kw_only=True)
class GeneratorDef:
    """The declaration of one network's generation."""

    model_key: ModelKey
    text: TextHandler
    latent: LatentHandler
    denoise: DenoiseHandler
    capabilities: Capabilities
