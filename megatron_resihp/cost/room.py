# SPDX-License-Identifier: Apache-2.0
"""The part of a device's memory that plans may use, and whether a change of plan fits into it.

Imports `config`, `plan` and this package.
"""

from dataclasses import replace
from typing import Final

from megatron_resihp.config import MEMORY_RESERVE
from megatron_resihp.cost.memory import MemoryUse, memory_of, state_in_both
from megatron_resihp.cost.model.layers import Model
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
    workers are ready: on the device, or in host memory where it fits there, beside what is put together there. Shards
    that stay are taken over, so they are there once, but not where they are parts of a distributed optimizer.

    A worker without work keeps its state and builds nothing.

    Args:
        before, after, model, training: the plans and their job.
        host: bytes of host memory that each worker may take.

    Raises:
        PlanError: a plan's layers differ from the model's, or members of a stage cannot share a layer.
    """
    held, wanted = (memory_of(plan, model, training) for plan in (before, after))
    parts = any(training.under(plan).distributed_optimizer for plan in (before, after))
    stay = {} if parts else state_in_both(before, after, model, training)
    put = put_together(before, after, model, training)
    working, peak = set(after.working), dict[int, int]()
    for worker in after.members:
        old = held.get(worker, _NOTHING)
        new = wanted[worker] if worker in working else _NOTHING
        moves = old.state - old.gradients + put.get(worker, 0) <= host
        together = 0 if moves else old.state + new.state - stay.get(worker, 0)
        peak[worker] = max(old.state, new.state, together)
    return peak


def check_change(
    before: ParallelPlan, after: ParallelPlan, model: Model, training: Training, capacity: int, host: int = 0
) -> None:
    """Arguments as of `peak_of_change`, and the bytes of each device.

    Raises:
        PlanError: old and new state together do not fit into `capacity` bytes, the host has no room, or a plan does
            not fit the model.
    """
    check_host(before, after, model, training, host)
    peak = peak_of_change(before, after, model, training, host)
    worst = max(peak, key=lambda worker: (peak[worker], -worker))
    if peak[worst] > capacity:
        sizes = f"{gib(peak[worst])} on worker {worst}; {gib(capacity)} may be used"
        raise PlanError(f"while it changes, old and new state together take {sizes}")


def check_host(before: ParallelPlan, after: ParallelPlan, model: Model, training: Training, host: int) -> None:
    """Arguments as of `peak_of_change`; of 0 bytes of host memory nothing is known.

    Raises:
        PlanError: a distributed optimizer's state can't be put together in `host` bytes, or as of `peak_of_change`.
    """
    put = put_together(before, after, model, training) if host else {}
    worst = max(put, key=lambda worker: (put[worker], -worker), default=None)
    if worst is not None and put[worst] > host:
        sizes = f"{gib(put[worst])} of host memory on worker {worst}; {gib(host)} may be used"
        raise PlanError(f"while it changes, the parts of the optimizer's state take {sizes}")


def put_together(before: ParallelPlan, after: ParallelPlan, model: Model, training: Training) -> dict[int, int]:
    """Bytes of host memory in which workers have their shard's parameters and all of its optimizer state during a
    change; none where both plans share a distributed optimizer, or neither does.

    Into a plan whose workers have all of the state, every holder puts its old shard's together. On the way out of one,
    each worker cuts its part out of all of its new shard's.

    Raises:
        PlanError: as of `peak_of_change`.
    """
    begins, ends = (training.under(plan).distributed_optimizer for plan in (before, after))
    if begins == ends:
        return {}
    used = memory_of(before if begins else after, model, replace(training, distributed_optimizer=False))
    there = set(after.members if begins else after.working)
    return {worker: use.weights + use.optimizer for worker, use in used.items() if worker in there and use.state}


def gib(count: int) -> str:
    """Bytes as people say them."""
    return f"{count / 2**30:,.1f} GiB"
