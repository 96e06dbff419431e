"""load_network: builds a network of ours and fills it from safetensors. The LOAD_MODEL node calls it."""

from __future__ import annotations

import logging

import torch

from kdit.errors import CheckpointError
from kdit.models.network import Network
from kdit.models.registry import network_class
from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.load_tensors import Wanted, load_tensors
from kdit.models.weights.plan import kept_dtype, plan_weights
from kdit.models.weights.stream import WeightStream
from kdit.ops.opset import OpSet

logger = logging.getLogger(__name__)


def load_network(
    component: ComponentFolder,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: OpSet,
    streamed: bool = False,
) -> Network:
    """The network of a transformer folder, ready to run: its weights in ``dtype`` on ``device``, no gradients.
    Those that the network keeps in float32 come in float32.

    ``streamed``: what ``prepare_mod`` alone uses stays on disk, and is loaded for each request as it is needed.
    Headers, names and shapes are checked before anything is allocated. See ``load_tensors`` for what is mapped and
    what is copied. Raises CheckpointError.
    """
    weights = component.open_weights()
    component.log_notices()
    net = build_on_meta(component, ops)
    placements = plan_weights(net, weights)
    with torch.inference_mode(False), torch.no_grad():  # plain tensors, also where a whole command runs in it
        net.requires_grad_(False)
        wanted = {
            name: Wanted(tuple(parameter.shape), kept_dtype(net, name, dtype))
            for name, parameter in net.named_parameters()
        }
        later = {name: wanted.pop(name) for name in list(wanted) if streamed and _is_streamed(net, name)}
        now = [placement for placement in placements if placement.target in wanted]
        net.load_state_dict(load_tensors(wanted, now, torch.device(device)), strict=not later, assign=True)
    if later:
        rest = [placement for placement in placements if placement.target in later]
        net.stream = WeightStream(net, later, rest, torch.device(device))
    held = (*net.named_parameters(), *net.named_buffers())
    unfilled = [name for name, tensor in held if tensor.is_meta and name not in later]
    assert not unfilled, f"{type(net).__name__} still has {unfilled} on the meta device"
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    logger.info("%s: %d parameters in %s on %s", component.path, num_parameters, dtype, device)
    return net.eval()


def _is_streamed(net: Network, name: str) -> bool:
    return any(name.startswith(f"{module}.") for module in net.streamed)


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
