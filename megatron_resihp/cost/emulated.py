# SPDX-License-Identifier: Apache-2.0
"""An emulated device in the planner's form: its links and the seconds of layers, scaled to the tiny job on it.

Imports numpy, `plan` and this package.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from megatron_resihp.cost import profile as emulated
from megatron_resihp.cost.device import Array, Device, layer_work
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.model.layers import LayerKind, Model, model_from_arguments
from megatron_resihp.cost.model.parts import ShardError
from megatron_resihp.cost.profile import DeviceProfile, LinkCost
from megatron_resihp.cost.training import Training, training_of_job
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.plan import OwnSplit

FLOPS: Final = 312e12
"""Peak of a device on which nothing attends; ratios between layers do not depend on it."""
_KINDS: Final[Mapping[LayerKind, emulated.LayerKind]] = {
    LayerKind.EMBEDDING: emulated.LayerKind.EMBEDDING,
    LayerKind.ATTENTION: emulated.LayerKind.ATTENTION,
    LayerKind.MLP: emulated.LayerKind.MLP,
    LayerKind.MOE_TRANSFORMER: emulated.LayerKind.MOE,
    LayerKind.LINEAR_MOE_TRANSFORMER: emulated.LayerKind.MOE,
    LayerKind.MAMBA: emulated.LayerKind.MAMBA,
    LayerKind.HEAD: emulated.LayerKind.HEAD,
}
F = OpKind.F


def cost_on(
    profile: DeviceProfile, arguments: Mapping[str, Any], own: OwnSplit, workers: int, micro_batches: int, memory: int,
    expert_groups: int = 1,
) -> JobCost:  # fmt: skip
    """The costs of a job on the emulated device's nodes, in seconds of the emulated clock. Replicas share nothing yet.

    Args:
        arguments: Megatron's.
        own: the job's own split into layers.
        workers, micro_batches: of the job.
        memory: bytes of a device.
        expert_groups: groups of a stage's members that have other experts each.

    Raises:
        ModelError, TrainingError: the arguments don't determine the model or its training.
    """
    model = model_from_arguments(arguments)
    training = replace(training_of_job(arguments, own), expert_groups=expert_groups)
    return JobCost(
        model, training, device_of(profile, model, training, memory, workers), micro_batches,
        workers_per_node=profile.workers_per_node,
        measured=seconds_of(profile, model, training, workers),
    )  # fmt: skip


def device_of(profile: DeviceProfile, model: Model, training: Training, memory: int, workers: int) -> Device:
    """The emulated device, with links on which the job's own small tensors take as long as a large job's on its links.

    Its peak is one at which this model's attention takes as long as the profile's: keys and values of others that come
    meanwhile cost nothing.

    Args:
        memory: bytes.
        workers: of the job; stages send each other results between nodes if it has more than one.
    """
    here = workers <= profile.workers_per_node
    link = profile.within_node if here else profile.between_nodes
    return Device(
        _flops(profile, model, training), latency=profile.time_scale * link.latency_s, memory=memory,
        bandwidth=_bytes_per_s(link, profile, model, training),
        node_bandwidth=_bytes_per_s(profile.within_node, profile, model, training),
    )  # fmt: skip


def seconds_of(profile: DeviceProfile, model: Model, training: Training, workers: int) -> dict[int, Array]:
    """Seconds of F, B and W of each layer for a micro-batch that nobody shares, as `integration.probes.padding` pads
    them, for each tensor-parallel degree of up to so many workers that can share the layers, [3, layers]; read-only."""
    return {degree: _seconds(profile, model, degree, *_workload(profile, training))
            for degree in range(1, workers + 1) if _can_share(model, training, degree)}  # fmt: skip


def _seconds(profile: DeviceProfile, model: Model, degree: int, tokens: float, squares: float) -> Array:
    passes = [profile.stage(kinds, degree) for kinds in _kinds(model)]
    seconds = np.array([[cost.seconds(tokens, squares) for cost in each] for each in passes]).T
    seconds.setflags(write=False)
    return seconds


def _can_share(model: Model, training: Training, degree: int) -> bool:
    try:
        layer_work(model, training, degree)
    except ShardError:
        return False
    return True


def _workload(profile: DeviceProfile, training: Training) -> tuple[float, float]:
    """N and Σ l² of a micro-batch as the profile counts them."""
    tokens = float(training.micro_batch_size * profile.sequence)
    return tokens, tokens * profile.sequence


def _kinds(model: Model) -> list[list[emulated.LayerKind]]:
    return [[_KINDS.get(kind, emulated.LayerKind.TRANSFORMER) for kind in layer.kinds] for layer in model.layers]


def _bytes_per_s(link: LinkCost, profile: DeviceProfile, model: Model, training: Training) -> float:
    emulated_bytes = profile.sequence / training.sequence_length * profile.boundary_bytes_per_token
    return link.bytes_per_s / profile.time_scale * model.hidden_bytes / emulated_bytes


def _flops(profile: DeviceProfile, model: Model, training: Training) -> float:
    _, squares = _workload(profile, training)
    attending = sum(profile.stage(kinds, 1)[F].per_square for kinds in _kinds(model)) * squares
    work = layer_work(model, training, 1)[F, :, 1].sum() * training.squares
    return float(work / attending) if attending and work else FLOPS
