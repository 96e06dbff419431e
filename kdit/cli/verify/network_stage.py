"""The stage "network (recorded inputs)": single forwards of the bare network. Used by verify/run.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from kdit.cli.verify.call_mapping import has_pipeline
from kdit.cli.verify.case import Case
from kdit.cli.verify.compare import StageReport, compare, not_available
from kdit.errors import InputError
from kdit.keys import FAMILIES
from kdit.models.network import Network
from kdit.models.reference_call import NetworkCall, run_call
from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.json_file import read_json
from kdit.models.weights.loading import load_network
from kdit.ops.opset import OpSet

NAME, TOLERANCE = "network (recorded inputs)", 1e-5
_OUTPUT = re.compile(r"denoiser\.(?P<component>\w+)\.call(?P<index>\d+)\.out")


class NetworkStage:
    """Compares the networks of one checkpoint folder; each is loaded at its first use."""

    def __init__(self, model: Path, device: str) -> None:
        self.model = model
        self.device = torch.device(device)
        self._networks: dict[str, Network] = {}

    def run(self, case: Case) -> StageReport:
        """Repeat every recorded denoiser call whose inputs were recorded whole.

        What the network cannot be given (InputError) is no failure while kdit has no pipeline that would need it.
        """
        pairs = []
        try:
            for component, index, expected in recorded_calls(case):
                family = _family(self._config(component))
                if family is None:
                    return not_available(NAME, f"kdit has no network for the {component} of {case.pipeline} yet")
                got, wanted = self._forward(case, family, component, index, expected)
                pairs.append((f"{component} call {index}", got, wanted))
        except InputError as error:
            if has_pipeline(case.pipeline):
                raise
            return not_available(NAME, str(error))
        return compare(NAME, pairs, TOLERANCE) if pairs else not_available(NAME, "no denoiser call was recorded")

    def _config(self, component: str) -> Mapping[str, object]:
        return read_json(self.model / component / "config.json")

    def _forward(self, case: Case, family: str, component: str, index: int, expected: Tensor) -> tuple[Tensor, Tensor]:
        """The network's prediction, and what of the recorded output it must equal."""
        inputs = {key: tensor.to(self.device) for key, tensor in recorded_inputs(case, component, index).items()}
        from_reference = import_module(f"kdit.models.{family}.reference_call").from_reference
        call: NetworkCall = from_reference(inputs, self._config(component))
        if component not in self._networks:
            folder = ComponentFolder.at(self.model / component)
            self._networks[component] = load_network(folder, dtype=torch.float32, device=self.device, ops=OpSet())
        with torch.inference_mode():
            predicted = run_call(self._networks[component], call)
        return predicted, expected if call.num_tokens is None else expected[:, : call.num_tokens]


def recorded_calls(case: Case) -> list[tuple[str, int, Tensor]]:
    """(component, number of the call, output) of every call whose inputs are all there.

    Large inputs are recorded in the first call only; a later call that lacks one is left out.
    """
    found = []
    for key, tensor in sorted(case.tensors.items()):
        match = _OUTPUT.fullmatch(key)
        if match is None:
            continue
        component, index = match["component"], int(match["index"])
        first = recorded_inputs(case, component, 0).keys()
        if first <= recorded_inputs(case, component, index).keys():
            found.append((component, index, tensor))
    return found


def recorded_inputs(case: Case, component: str, index: int) -> dict[str, Tensor]:
    """The recorded arguments of one denoiser call."""
    prefix = f"denoiser.{component}.call{index}.in."
    return {key.removeprefix(prefix): tensor for key, tensor in case.tensors.items() if key.startswith(prefix)}


def _family(config: Mapping[str, object]) -> str | None:
    return next((entry.name for entry in FAMILIES.values() if config.get("_class_name") in entry.network_classes), None)
