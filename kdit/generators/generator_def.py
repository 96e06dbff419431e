"""GeneratorDef: all that the final runner needs to know about a family."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kdit.errors import InputError
from kdit.generators.capabilities import Capabilities
from kdit.generators.handlers import DenoiseHandler, LatentHandler, TextHandler
from kdit.keys import ModelKey, TensorKey, family_of_model


@dataclass(frozen=True, kw_only=True)
class GeneratorDef:
    """The declaration of one network's generation."""

    model_key: ModelKey
    text: TextHandler
    latent: LatentHandler
    denoise: DenoiseHandler
    capabilities: Capabilities

    def check_inputs(self, given: Iterable[TensorKey]) -> None:
        """Refuse inputs of the loop that the family does not read: they would be lost without a word."""
        taken = self.capabilities.inputs
        unread = [key.name for key in given if key not in taken]
        if unread:
            title, names = family_of_model(self.model_key).title, ", ".join(key.name for key in taken)
            raise InputError(f"{title} takes no {', '.join(unread)}; it takes {names}")
