# SPDX-License-Identifier: Apache-2.0
"""Builds and tears down Megatron's world for a plan: groups, seeds, and the singletons that remember the old epoch.

May import megatron and everything of this package.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core import mpu
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.training import get_timers

from megatron_resihp.executor.gloo.groups_ahead import GroupNeeds, GroupsAhead
from megatron_resihp.integration.modes.choice import mode_of
from megatron_resihp.integration.patches import documents, prediction_metrics
from megatron_resihp.integration.patches.experts import expert_metrics
from megatron_resihp.integration.progress import NO_DOCUMENTS
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.world.engine import forget_its_gradients
from megatron_resihp.integration.world.group_needs import timeout_of
from megatron_resihp.plan import ParallelPlan


def build_world(runtime: Runtime, plan: ParallelPlan, ahead: GroupsAhead | None = None) -> None:
    """Make a plan's process groups; standbys get side groups only.

    Args:
        ahead: groups that all members of the plan have made for it.
    """
    args = runtime.job.args
    runtime.communicators.begin(runtime.epoch, plan.digest, ahead)
    if runtime.job.batch_steps:
        args.global_batch_size = plan.micro_batch_count * args.micro_batch_size
    runtime.mode = mode_of(runtime, plan, runtime.communicators.side_group)
    if runtime.view.works:
        order = runtime.view.rank_order
        args.rank, args.world_size = order.index(runtime.worker), len(order)
        runtime.communicators.join_world(args.distributed_backend, order, timeout_of(args))
    runtime.mode.meet()


def needs_of(runtime: Runtime, plan: ParallelPlan) -> GroupNeeds:
    """The groups of gloo's that this worker will make for a plan that is to come. Called from any thread."""
    side_groups: list[tuple[str, tuple[int, ...]]] = []

    def note(name: str, workers: Sequence[int]) -> Any:
        side_groups.append((name, tuple(workers)))

    mode = mode_of(runtime, plan, note)
    if not mode.view.works:
        return GroupNeeds(tuple(side_groups))
    rank = mode.view.rank_order.index(runtime.worker)
    return GroupNeeds(tuple(side_groups), rank, tuple(mode.wanted_groups()))


def tear_down(runtime: Runtime) -> None:
    """Destroy every group of the old epoch and what remembers it."""
    runtime.mode.close()
    expert_metrics.forget()
    prediction_metrics.forget()
    mpu.destroy_model_parallel()
    forget_its_gradients()
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
    # An error that was injected (--error-injection-rate) is gone with its attempt. Left there, it would be taken for
    # the cause of the next real one, and none would be injected any more.
    rerun.error_injector.injected_error_type = None
    documents.forget()
    runtime.progress.documents = NO_DOCUMENTS
