# SPDX-License-Identifier: Apache-2.0
"""The part of a device's memory that plans may use, and whether a change of plan fits into it.

Imports `config`, `plan` and this package.
"""

from megatron_resihp.config import MEMORY_RESERVE
from megatron_resihp.cost.layers import Model
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import ParallelPlan, PlanError


def usable(memory: int, reserve: float = MEMORY_RESERVE) -> int:
    """Bytes of a device that plans may use; `reserve` percent are for its context, communicators and fragmentation."""
    return int(memory * (1 - reserve / 100))


def peak_of_change(before: ParallelPlan, after: ParallelPlan, model: Model, training: Training) -> dict[int, int]:
    """Bytes of state on each worker of the next plan during the change: the old state stays until all workers are
    ready.

    A worker without work keeps its state and builds nothing.

    Raises:
        PlanError: a plan's layers differ from the model's, or members of a stage cannot share a layer.
    """
    held = {worker: use.state for worker, use in memory_of(before, model, training).items()}
    wanted = {worker: use.state for worker, use in memory_of(after, model, training).items()}
    working = set(after.working)
    return {worker: held.get(worker, 0) + wanted[worker] * (worker in working) for worker in after.members}


def check_change(before: ParallelPlan, after: ParallelPlan, model: Model, training: Training, capacity: int) -> None:
    """Raises:
    PlanError: old and new state together do not fit into `capacity` bytes, or a plan does not fit the model.
    """
    peak = peak_of_change(before, after, model, training)
    worst = max(peak, key=lambda worker: (peak[worker], -worker))
    if peak[worst] > capacity:
        sizes = f"{gib(peak[worst])} on worker {worst}; {gib(capacity)} may be used"
        raise PlanError(f"while it changes, old and new state together take {sizes}")


def gib(count: int) -> str:
    """Bytes as people say them."""
    return f"{count / 2**30:,.1f} GiB"
