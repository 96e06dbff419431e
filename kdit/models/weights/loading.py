"""load_network: builds a network of ours and fills it from safetensors. The LOAD_MODEL node calls it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import groupby

import torch
from safetensors import safe_open
from torch import Tensor

from kdit.errors import CheckpointError
from kdit.models.network import Network
from kdit.models.registry import network_class
from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.plan import Placement, kept_dtype, plan_weights
from kdit.ops.opset import OpSet

logger = logging.getLogger(__name__)


def load_network(component: ComponentFolder, *, dtype: torch.dtype, device: torch.device | str, ops: OpSet) -> Network:
    """The network of a transformer folder, ready to run: its weights in ``dtype`` on ``device``, no gradients.
    Those that the network keeps in float32 come in float32.

    Headers, names and shapes are checked before anything is allocated. Each parameter is allocated once,
    at its final size; the tensors of the files are copied into it one by one, each cast while it is copied.
    Raises CheckpointError.
    """
    weights = component.open_weights()
    net = build_on_meta(component, ops)
    placements = plan_weights(net, weights)
    with torch.inference_mode(False), torch.no_grad():  # plain tensors, also where a whole command runs in it
        net.requires_grad_(False)
        tensors = {
            name: torch.empty(parameter.shape, dtype=kept_dtype(net, name, dtype), device=device)
            for name, parameter in net.named_parameters()
        }
        _fill(tensors, placements)
        net.load_state_dict(tensors, strict=True, assign=True)
    held = (*net.named_parameters(), *net.named_buffers())
    unfilled = [name for name, tensor in held if tensor.is_meta]
    assert not unfilled, f"{type(net).__name__} still has {unfilled} on the meta device"
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    logger.info("%s: %d parameters in %s on %s", component.path, num_parameters, dtype, device)
    return net.eval()


def check_network(component: ComponentFolder) -> None:
    """All that ``load_network`` checks, without loading; raises CheckpointError."""
    plan_weights(build_on_meta(component, OpSet()), component.open_weights())


def build_on_meta(component: ComponentFolder, ops: OpSet) -> Network:
    """The network without storage; raises CheckpointError for a class or a config that kdit does not have."""
    network = network_class(component.class_name, str(component.config_path))
    try:
        with torch.inference_mode(False), torch.device("meta"):
            return network.from_config(component.config, ops=ops)
    except CheckpointError as error:
        raise CheckpointError(f"{component.config_path}: {error}") from error


def _fill(tensors: dict[str, Tensor], placements: Iterable[Placement]) -> None:
    """Copy every source into its slice, file by file and front to back."""
    in_file_order = sorted(placements, key=lambda placement: (placement.source.path, placement.source.start))
    for path, group in groupby(in_file_order, key=lambda placement: placement.source.path):
        with safe_open(path, framework="pt") as file:  # maps the file; a source's pages are read as it is copied
            for source, target, dim, offset in group:
                whole = tensors[target]
                part = whole.narrow(dim, offset, source.shape[dim]) if source.shape else whole
                part.copy_(file.get_tensor(source.name))
