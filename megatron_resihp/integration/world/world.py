# SPDX-License-Identifier: Apache-2.0
"""Builds and tears down Megatron's world for a plan: groups, seeds, and the singletons that remember the old epoch.

May import megatron and everything of this package.
"""

from datetime import timedelta
from typing import Any, NamedTuple

from megatron.core import mpu
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.training import get_timers
from megatron.training.initialize import _set_random_seed

from megatron_resihp.executor.gloo.groups_ahead import GroupsAhead
from megatron_resihp.executor.side_group import MakeSideGroup, SideGroup
from megatron_resihp.executor.slice_sums import Bucket, make_buckets
from megatron_resihp.integration.ops.program_schedule import make_exchange, training_routes
from megatron_resihp.integration.patches import documents, expert_metrics
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.step.buddies import join_buddies
from megatron_resihp.integration.step.optimizer_buddies import Ring, join_ring
from megatron_resihp.integration.world.heterogeneous import Heterogeneous
from megatron_resihp.integration.world.heterogeneous_groups import as_stage
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.spelling import spelled_out

SEED_STRIDE = 1_000_003


class SideGroups(NamedTuple):
    """Groups of a plan outside torch's world, as one worker is in them."""

    everybody: SideGroup
    buckets: list[Bucket]
    ring: Ring | None
    buddies: SideGroup | None


def build_world(runtime: Runtime, ahead: GroupsAhead | None = None) -> None:
    """Make the current plan's process groups; standbys get side groups only.

    Args:
        ahead: groups that all members of the plan have made for it.
    """
    args, plan = runtime.args, runtime.current_plan
    runtime.heterogeneous = view_of(runtime, plan)
    runtime.communicators.begin(runtime.epoch, plan.digest, ahead)
    runtime.everybody, runtime.buckets, runtime.ring, runtime.buddies = side_groups_of(
        runtime, plan, runtime.heterogeneous, runtime.communicators.side_group
    )
    if not runtime.works:
        return
    order = rank_order(runtime)
    args.rank, args.world_size = order.index(runtime.worker), len(order)
    runtime.communicators.join_world(args.distributed_backend, order, timeout_of(args))
    if runtime.heterogeneous is not None:
        runtime.routes = training_routes(runtime, runtime.heterogeneous)


def side_groups_of(
    runtime: Runtime, plan: ParallelPlan, heterogeneous: Heterogeneous | None, make_group: MakeSideGroup
) -> SideGroups:
    """Those of this worker under a plan, which need not be the one in force.

    Args:
        heterogeneous: `view_of` the plan.
    """
    everybody = make_group("everybody", plan.members)
    if heterogeneous is not None:
        return SideGroups(everybody, make_buckets(heterogeneous.holders, runtime.worker, make_group), None, None)
    coordinate, ring, buddies = plan.coordinate_of(runtime.worker), None, None
    if coordinate is not None and runtime.shares_optimizer:
        ring = join_ring(plan, coordinate, runtime.worker, make_group)
    elif coordinate is not None:
        buddies = join_buddies(plan, coordinate, runtime.worker, make_group)
    return SideGroups(everybody, [], ring, buddies)


def timeout_of(args: Any) -> timedelta:
    """How long operations in torch's world may wait."""
    return timedelta(minutes=args.distributed_timeout_minutes)


def view_of(runtime: Runtime, plan: ParallelPlan) -> Heterogeneous | None:
    """How this worker sees a plan that Megatron's own groups can't run; None for one that they can."""
    if plan.not_uniform is None:
        return None
    return Heterogeneous(spelled_out(plan, runtime.own.chunks), runtime.worker, runtime.own.tied_head)


def rank_order(runtime: Runtime) -> tuple[int, ...]:
    """The worker id of each torch rank."""
    return order_of(runtime, runtime.current_plan, runtime.heterogeneous)


def order_of(runtime: Runtime, plan: ParallelPlan, heterogeneous: Heterogeneous | None) -> tuple[int, ...]:
    """The worker id of each torch rank under a plan; `heterogeneous`: `view_of` it."""
    if heterogeneous is not None:
        return heterogeneous.rank_order
    return plan.rank_order(pipeline_last=not runtime.args.use_tp_pp_dp_mapping)


def build_model_parallel(runtime: Runtime) -> None:
    """Megatron's groups in the new world, and its random streams."""
    assert runtime.build_groups is not None and runtime.megatron_groups is not None and runtime.sizes is not None
    heterogeneous = runtime.heterogeneous
    if heterogeneous is None:
        runtime.sizes.restore()
        runtime.build_groups()
        _start_streams(runtime)
        return
    runtime.sizes.replace(heterogeneous)
    runtime.megatron_groups.replace(heterogeneous)
    runtime.exchange = make_exchange(runtime, heterogeneous)
    with as_stage(heterogeneous.own_chunks[0], len(heterogeneous.chunks)):
        _start_streams(runtime)


def _start_streams(runtime: Runtime) -> None:
    args = runtime.args
    # Streams restart in every epoch (DESIGN contract 2): from seed, epoch, stage and, in Megatron, TP rank.
    _set_random_seed(args.seed + SEED_STRIDE * runtime.epoch, args.data_parallel_random_init, args.te_rng_tracker)


def tear_down(runtime: Runtime) -> None:
    """Destroy every group of the old epoch and what remembers it."""
    runtime.everybody = runtime.buddies = runtime.exchange = runtime.ring = None
    runtime.buckets, runtime.routes = [], ()
    # A standby of the next plan runs nothing that would count them anew, and its gradients are divided too.
    runtime.tokens, runtime.seen_documents = 0.0, None
    expert_metrics.forget()
    mpu.destroy_model_parallel()
    runtime.communicators.destroy()


def reset_singletons(runtime: Runtime, rerun_mode: RerunMode) -> None:
    """Timers, the rerun state machine and packed-document statistics, which a failure leaves half-way."""
    timers = get_timers()
    for timer in timers._timers.values():
        timer._started = False
        timer.reset()
    rerun = get_rerun_state_machine()
    rerun.state = RerunState.NOT_RUNNING_YET
    rerun.set_mode(rerun_mode)
    rerun.rerun_requested = rerun.checkpoint_requested = False
    rerun.restart_again_requested = rerun.continue_requested = False
    rerun.data_iterator_checkpoints = None
    documents.forget()
    runtime.documents = documents.NONE
