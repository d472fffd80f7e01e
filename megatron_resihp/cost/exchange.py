# SPDX-License-Identifier: Apache-2.0
"""Seconds that replicas which share experts or sequences spend on each other's tokens, or keys and values.

Imports numpy and this package.

What goes to workers of the own node and what goes to others travels at the same time. Experts' tokens are dispatched
and combined, so they cross twice in F and twice in B. Keys and values go once around in F; in B they do so again, with
their gradients. In a ring they travel while a worker attends to others, so only what takes longer than that counts.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.model.layers import Layer, Model
from megatron_resihp.cost.model.parts import Part
from megatron_resihp.cost.training import Recompute, Training
from megatron_resihp.pipeline.op import OpKind

F, B, W = OpKind
_CROSSINGS: Final = 2
"""Of tokens that go to experts: there and back."""


def exchange_seconds(
    model: Model, training: Training, device: Device, degree: int, near: int,
    spread: tuple[float, float] | None = None,
) -> NDArray[np.float64]:  # fmt: skip
    """Seconds of F, B and W of each layer, [3, layers]; read-only.

    Args:
        model, training, device: `training` says how many share.
        degree: tensor-parallel.
        near: how many replicas of those that share the one with the fewest has on its node, itself included.
        spread: which share of a worker's tokens goes to others of its node, and which to other nodes; None: as much to
            each that shares. A stage's members with other experts each are on one node.
    """
    distinct, index = model.distinct
    spread = _evenly(training, near) if spread is None else spread
    of_layers = np.array([_of_layer(layer, training, device, degree, near, spread) for layer in distinct]).T
    of_layers = of_layers[:, list(index)]
    of_layers.setflags(write=False)
    return of_layers


def nearest(members: Sequence[tuple[int, ...]], workers_per_node: int) -> int:
    """How many workers of a node share with each other at least: the one with the fewest sends most to other nodes.

    Args:
        members: of a stage in each of the replicas.
        workers_per_node: worker w lives on node w // workers_per_node.
    """
    nodes = Counter(group[0] // workers_per_node for group in members)
    return min(nodes.values())


def _of_layer(
    layer: Layer, training: Training, device: Device, degree: int, near: int, spread: tuple[float, float]
) -> tuple[float, float, float]:  # fmt: skip
    forward = backward = 0.0
    for part in layer.parts:
        if part.experts and any(spread):
            each = _CROSSINGS * _all_to_all(part, training, device, degree, spread)
            forward, backward = forward + each, backward + each
        elif part.exchanged_bytes and not part.experts and training.context_parallel > 1:
            there, back = _around(part, training, device, degree, near)
            forward, backward = forward + there, backward + back
    if training.recompute is Recompute.FULL and layer.recomputable:
        backward += forward
    return forward, backward, 0.0


def _evenly(training: Training, near: int) -> tuple[float, float]:
    groups = training.expert_groups
    sharers, near = training.expert_parallel * groups, min(near, training.expert_parallel) * groups
    return (near - 1) / sharers, (sharers - near) / sharers


def _all_to_all(
    part: Part, training: Training, device: Device, degree: int, spread: tuple[float, float]
) -> float:  # fmt: skip
    """Of the worker that sends most to others; how much that is `training.expert_loads` says."""
    cut = degree if training.sequence_parallel else 1
    tokens = training.tokens * training.busiest_share(part.experts)
    size = part.exchanged_bytes * tokens / training.context_parallel / cut
    inside, outside = size * spread[0], size * spread[1]
    return device.latency + max(inside / device.node_bandwidth, outside / device.bandwidth)


def _around(part: Part, training: Training, device: Device, degree: int, near: int) -> tuple[float, float]:
    """Keys and values of the others, forward and backward; a ring is as fast as its slowest link."""
    sharers = training.context_parallel
    share = float(part.share(degree, 0))
    bandwidth = device.node_bandwidth if near >= sharers else device.bandwidth
    once = (sharers - 1) * (
        device.latency + share * part.exchanged_bytes * training.tokens / sharers / bandwidth
    )  # fmt: skip
    if training.gathers_context:
        return once, 2 * once
    attending = share * part.square_flops * training.squares / sharers / device.rate(degree)
    return max(0.0, once - attending), max(0.0, 2 * once - 2 * attending)
