"""NetworkCall: one recorded forward of a reference transformer, in kdit's terms; ``run_call`` repeats it.

``kdit.models.<family>.reference_call.from_reference`` makes it; ``kdit verify`` and the parity tests call both.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kdit.models.network import Network
from kdit.models.prepare import prepare_static
from kdit.models.rows import Cond, LatentShape, ModTable, Rows
from kdit.models.stack import predict


class NetworkCall(NamedTuple):
    """Inputs of one forward: what ``embed``, ``prepare_mod`` and ``prepare_static`` take."""

    latents: Tensor  # [R, ...] in the layout of Rows.latents
    timesteps: Tensor  # [R], or [R, k] where tokens of one row stand at k different times
    cond: Cond
    shape: LatentShape  # of one row, as prepare_static takes it
    num_tokens: int | None = None  # of the recorded output, the first that the network predicts; None: all


def call_rows(net: Network, call: NetworkCall) -> Rows:
    """The rows of one step. Inputs go to the network's device, all but the times to its dtype."""
    latents = call.latents.to(net.device, net.dtype)
    cond = {key: value.to(net.device, net.dtype) for key, value in call.cond.items()}
    num_rows = latents.shape[0]
    times = call.timesteps.to(net.device)
    mod = ModTable.cat(
        [
            net.prepare_mod(times[i : i + 1], {key: value[i : i + 1] for key, value in cond.items()})
            for i in range(num_rows)
        ]
    )
    return Rows(latents, mod.at(0), prepare_static(net, cond, call.shape), tuple(range(num_rows)))


def run_call(net: Network, call: NetworkCall) -> Tensor:
    """The network's prediction [R, ...], as the reference returns it (of its tokens the first ``num_tokens``)."""
    return predict(net, call_rows(net, call))
