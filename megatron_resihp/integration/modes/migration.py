# SPDX-License-Identifier: Apache-2.0
"""State on its way into a new epoch: by whole shards of the job's own layout, or by slices between any shards.

May import torch, megatron and this package.
"""

import torch

from megatron_resihp.control.coordination.digests import name_of
from megatron_resihp.executor.transfer import plan_transfers, receive_tensors, send_tensors
from megatron_resihp.integration.progress import ContractBroken
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.digests import shard_digest
from megatron_resihp.integration.state.parameter_slices import Beside
from megatron_resihp.integration.state.shard import (
    fill_shard,
    group_steps,
    shard_tensors,
    states_of,
    with_moments_on_device,
)
from megatron_resihp.integration.state.slice_state import (
    Holding,
    HostFiller,
    Redistribution,
    WholeState,
    move_state,
)
from megatron_resihp.integration.step.copied_experts import beside
from megatron_resihp.integration.trained import Trained
from megatron_resihp.plan import Coordinate, ParallelPlan
from megatron_resihp.plan.slices import all_shards, cuts_of, shares_of
from megatron_resihp.plan.spelling import spelled_out
from megatron_resihp.protocol.published import EpochPlan

Holders = dict[int, Coordinate | None]
"""The shard of the job's own layout that each worker holds; None: it holds nothing."""


def own_shards(runtime: Runtime, order: EpochPlan) -> Holders | None:
    """What each member holds; None if some hold shards of another layout."""
    held = {worker: runtime.job.own.coordinate_of(shards) for worker, shards in order.held.items()}
    return None if any(shards and not held[worker] for worker, shards in order.held.items()) else held


def migrate_shards(runtime: Runtime, order: EpochPlan, trained: Trained, held: Holders) -> tuple[int, dict[str, str]]:
    """Move whole shards between two uniform plans.

    Returns:
        the bytes received, and digests of the state before and after.
    """
    everybody, worker, old = runtime.mode.everybody, runtime.worker, runtime.held.live
    # New objects take over tensors of the old ones, so this comes first.
    digests = shard_digest(old, held[worker])
    received = 0
    for transfer in plan_transfers(order.plan, held):
        if transfer.source == worker:
            send_tensors(everybody, transfer.target, shard_tensors(old), {"steps": group_steps(old)})
        elif transfer.target == worker:
            device = torch.device("cpu") if old.away else torch.device("cuda", torch.cuda.current_device())
            tensors, extra = receive_tensors(everybody, transfer.source, device)
            # The sender's may be in host memory, and stay there on the way.
            fill_shard(trained, with_moments_on_device(tensors), extra["steps"])
            received = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if worker in (transfer.source, transfer.target):
            runtime.reach("recovery-migrate")
    if trained is old:
        return received, digests
    if not received:
        tensors = shard_tensors(old)
        fill_shard(trained, with_moments_on_device(tensors) if old.away else tensors, group_steps(old))
    return received, with_those_after(digests, runtime.mode.state.digests(trained))


def migrate_slices(
    runtime: Runtime, order: EpochPlan, trained: Trained, whole: WholeState | None = None,
    filler: HostFiller | None = None,
) -> tuple[int, dict[str, str]]:  # fmt: skip
    """Move slices between shards that are cut unlike each other; the result is that of `migrate_shards`.

    Args:
        whole, filler: where the state is, and where it goes, if not in the objects.
    """
    own, worker, old = runtime.job.own, runtime.worker, runtime.held.live
    wanted = all_shards(spelled_out(order.plan, own.chunks))
    tables = order.held, order.copied, wanted
    everything = [shard for table in tables for shards in table.values() for shard in shards]
    layout = cuts_of(everything), own.tied_head, shares_of(everything)
    before = Holding(
        old, order.held[worker], *layout, whole or WholeState(states_of(old), group_steps(old)),
        _copy_here(runtime, order, *layout),
    )  # fmt: skip
    after = None if trained is old else Holding(trained, wanted[worker], *layout)
    received = move_state(
        runtime.mode.everybody, worker, before, after, Redistribution(order.held, wanted, *layout, order.copied),
        lambda: runtime.reach("recovery-migrate"), filler,
    )  # fmt: skip
    if after is None:
        return received, before.digests()
    if filler is not None:
        after.whole = filler.whole
    return received, with_those_after(before.digests(), after.digests())


def _copy_here(runtime: Runtime, order: EpochPlan, cuts: int, tied_head: int | None, shares: int) -> Beside | None:
    """The copy of experts that this worker is thought to have. Raises RuntimeError if it hasn't."""
    if runtime.worker not in order.copied:
        return None
    held = runtime.held
    if held.experts is None:
        raise RuntimeError("this worker has no copy of experts, and is thought to have one")
    return beside(held.live, order.held[runtime.worker], held.experts, cuts, tied_head, shares)


def digests_by_slice(
    runtime: Runtime, plan: ParallelPlan, trained: Trained, whole: WholeState | None = None
) -> dict[str, str]:
    """Of what a plan gives this worker, cut no further than by this plan. `whole`: as of `Holding`."""
    own, shards = runtime.job.own, all_shards(spelled_out(plan, runtime.job.own.chunks))
    everything = [shard for held in shards.values() for shard in held]
    layout = cuts_of(everything), own.tied_head, shares_of(everything)
    return Holding(trained, shards[runtime.worker], *layout, whole).digests()


def with_those_after(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Digests of all that this worker held before and holds after its state has moved.

    Raises:
        ContractBroken: what it has kept isn't what it was.
    """
    for key in before.keys() & after.keys():
        if before[key] != after[key]:
            raise ContractBroken(f"the state of {name_of(key)} is not what it was before it moved")
    return before | after
