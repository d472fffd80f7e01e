# SPDX-License-Identifier: Apache-2.0
"""The part of a device's memory that plans may use, and whether a change of plan fits into it.

Imports `config`, `plan` and this package.
"""

from typing import Final

from megatron_resihp.config import MEMORY_RESERVE
from megatron_resihp.cost.layers import Model
from megatron_resihp.cost.memory import MemoryUse, memory_of, state_in_both
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import ParallelPlan, PlanError

_NOTHING: Final = MemoryUse(0, 0, 0, 0, 0)


def usable(memory: int, reserve: float = MEMORY_RESERVE) -> int:
    """Bytes of a device that plans may use; `reserve` percent are for its context, communicators and fragmentation."""
    return int(memory * (1 - reserve / 100))


def peak_of_change(
    before: ParallelPlan, after: ParallelPlan, model: Model, training: Training, host: int = 0
) -> dict[int, int]:
    """Bytes of state on the device of each worker of the next plan during the change. The old state stays until all
    workers are ready: on the device, or in host memory where it fits there. Shards that stay are taken over, so they
    are there once, but not where they are parts of a distributed optimizer.

    A worker without work keeps its state and builds nothing.

    Args:
        before, after, model, training: the plans and their job.
        host: bytes of host memory that each worker may take.

    Raises:
        PlanError: a plan's layers differ from the model's, or members of a stage cannot share a layer.
    """
    held, wanted = (memory_of(plan, model, training) for plan in (before, after))
    stay = {} if training.distributed_optimizer else state_in_both(before, after, model, training)
    working, peak = set(after.working), dict[int, int]()
    for worker in after.members:
        old = held.get(worker, _NOTHING)
        new = wanted[worker] if worker in working else _NOTHING
        moves = old.state - old.gradients <= host
        together = 0 if moves else old.state + new.state - stay.get(worker, 0)
        peak[worker] = max(old.state, new.state, together)
    return peak


def check_change(
    before: ParallelPlan, after: ParallelPlan, model: Model, training: Training, capacity: int, host: int = 0
) -> None:
    """Arguments as of `peak_of_change`, and the bytes of each device.

    Raises:
        PlanError: old and new state together do not fit into `capacity` bytes, or a plan does not fit the model.
    """
    peak = peak_of_change(before, after, model, training, host)
    worst = max(peak, key=lambda worker: (peak[worker], -worker))
    if peak[worst] > capacity:
        sizes = f"{gib(peak[worst])} on worker {worst}; {gib(capacity)} may be used"
        raise PlanError(f"while it changes, old and new state together take {sizes}")


def gib(count: int) -> str:
    """Bytes as people say them."""
    return f"{count / 2**30:,.1f} GiB"
