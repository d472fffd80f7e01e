# SPDX-License-Identifier: Apache-2.0
"""The part of a device's memory that plans may fill, and whether a change of plan fits into it.

Imports `config`, `plan` and this package.
"""

from megatron_resihp.config import MEMORY_RESERVE
from megatron_resihp.cost.layers import Model
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import ParallelPlan, PlanError


def usable(memory: int, reserve: float = MEMORY_RESERVE) -> int:
    """Bytes of a device that plans may fill; so many percent are for its context, communicators and fragmentation."""
    return int(memory * (1 - reserve / 100))


def peak_of_change(before: ParallelPlan, after: ParallelPlan, model: Model, training: Training) -> dict[int, int]:
    """Bytes of state on each worker of the next plan while that is built: what it holds stays until all are ready.

    Who gets no work keeps what it has, and builds nothing.

    Raises:
        PlanError: a plan has other layers than the model, or members of a stage can't share a layer.
    """
    held = {worker: use.state for worker, use in memory_of(before, model, training).items()}
    wanted = {worker: use.state for worker, use in memory_of(after, model, training).items()}
    working = set(after.working)
    return {worker: held.get(worker, 0) + wanted[worker] * (worker in working) for worker in after.members}


def check_change(before: ParallelPlan, after: ParallelPlan, model: Model, training: Training, capacity: int) -> None:
    """Raises:
    PlanError: old and new state together don't fit into so many bytes, or a plan is not of this model.
    """
    peak = peak_of_change(before, after, model, training)
    worst = max(peak, key=lambda worker: (peak[worker], -worker))
    if peak[worst] > capacity:
        sizes = f"{_gib(peak[worst])} on worker {worst}; {_gib(capacity)} may be used"
        raise PlanError(f"while it changes, old and new state together take {sizes}")


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"
