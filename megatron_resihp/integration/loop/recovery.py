# SPDX-License-Identifier: Apache-2.0
"""From a broken epoch to the next one, in place: report, commit, rebuild, migrate, go.

May import megatron and everything of this package. Nothing of the old shard is given up before every member is ready,
so a failure at any point leads back to the old state or on to a newer plan, never to a mixture (DESIGN contract 4).
"""

import gc
import sys
import time
import traceback
from functools import partial
from typing import Any, Final

import torch
from megatron.core.rerun_state_machine import RerunMode

from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.worker.errors import CoordinatorLost, EpochBroken, JobEnded
from megatron_resihp.executor.groups.errors import is_communicator_error, is_out_of_memory
from megatron_resihp.executor.host_memory import host_memory_of
from megatron_resihp.integration.logs.profiling import end_profiling
from megatron_resihp.integration.loop.device_loss import abort_or_die, comes_of_a_break, die_of_fault
from megatron_resihp.integration.loop.emergency_checkpoint import name_if_whole, write_emergency_checkpoint
from megatron_resihp.integration.loop.joining import stand_at
from megatron_resihp.integration.loop.making_room import make_room
from megatron_resihp.integration.loop.notes import Phases
from megatron_resihp.integration.loop.overlap import leave_overlap
from megatron_resihp.integration.modes.mode import Migrated
from megatron_resihp.integration.patches.counting import (
    count_again,
    count_consumed,
    note_in_progress_log,
    restore_counters,
)
from megatron_resihp.integration.patches.stragglers import forget_ranks
from megatron_resihp.integration.probes.fault_injection import StagedError
from megatron_resihp.integration.progress import ContractBroken
from megatron_resihp.integration.replacing import become, take_apart
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.footprint import (
    bring_gradients_back,
    bytes_away,
    footprint_of,
    free_gradients,
    storages,
)
from megatron_resihp.integration.state.host_state import return_to_device
from megatron_resihp.integration.step.extra_states import move_extra_state
from megatron_resihp.integration.step.step import install_step, take_step
from megatron_resihp.integration.trained import Trained
from megatron_resihp.integration.world.engine import meet_before_it
from megatron_resihp.integration.world.world import build_world, reset_singletons, tear_down
from megatron_resihp.plan.spelling import spelled_out
from megatron_resihp.protocol.published import Decision, EmergencyCheckpointOrder, EpochPlan
from megatron_resihp.protocol.records import Commit, IterationPhase

ALL_IDLE_S: Final = 10.0
"""How long workers that leave an epoch by choice wait for each other: what one is late for is in the order of an
iteration's end."""


class PlanChange(Exception):
    """All workers leave the epoch after the same step, because they have agreed to: no worker has died."""


class TooLittleMemory(Exception):
    """The device's memory has run out while new objects were built or filled; there is a way that takes less."""


class TakenIn(Exception):
    """A plan has this worker in it, which was started anew.

    Attributes:
        order: the plan.
    """

    def __init__(self, order: Decision) -> None:
        super().__init__()
        self.order = order


def leave_if_agreed(runtime: Runtime, grows: bool) -> None:
    """Called between two iterations.

    Args:
        grows: the next one's batch is larger than those of the plan in force, which all workers know by themselves.

    Raises:
        PlanChange: all workers leave now.
    """
    if runtime.orders.change or grows:
        runtime.orders.change = False
        raise PlanChange


def is_ours(runtime: Runtime, error: BaseException) -> bool:
    """Whether an error starts a recovery: a communicator's, any while the epoch is marked as broken, or, once, any in
    the first step of a plan that was chosen."""
    if blames_plan(runtime, error):
        return True
    if is_out_of_memory(error):
        # What an aborted collective leaves may have been taken for a size.
        return runtime.control.heard.broken()
    return (
        isinstance(error, PlanChange | TakenIn | TooLittleMemory)
        or _is_an_interruption(error)
        or runtime.control.heard.broken()
    )


def blames_plan(runtime: Runtime, error: BaseException) -> bool:
    """Whether another plan may be spared this error: no step has been agreed on under one that was chosen.

    A worker that no plan has been run with yet just ends: the others go on without it.
    """
    not_its = PlanChange | TakenIn | TooLittleMemory | JobEnded | ContractBroken
    others = isinstance(error, not_its) or _is_an_interruption(error)
    return runtime.on_trial and not runtime.joining and (is_out_of_memory(error) or not others)


def recover(runtime: Runtime, error: Exception) -> None:
    """Bring this worker into the next epoch that holds.

    Raises:
        the error itself: if it is none of ours, or strikes again at the same place on the way.
        JobEnded: nothing to go on with; what this worker holds has been saved if it was asked to.
    """
    phases = Phases()
    runtime.recovery.last_step_at = None
    struck: set[tuple[Any, ...]] = set()
    while True:
        blame, answer_s = None, runtime.job.config.resihp_answer_timeout
        if blames_plan(runtime, error) and not runtime.control.heard.broken():
            blame = partial(runtime.control.blame_plan, error, answer_s)
        die_of_fault(runtime.control, error, runtime.recovery.since is not None, blame)
        if not is_ours(runtime, error) and not _comes_of_a_break(runtime, error):
            raise error
        if blame is not None:
            print("resihp: the first step under a plan that was chosen has failed:", file=sys.stderr)
            traceback.print_exception(error)
        _let_go_of_frames(error)
        if not isinstance(error, PlanChange | TakenIn):
            with phases.phase("notice"):
                (blame or partial(runtime.control.suspect, error, answer_s))()
        # What strikes on the way to the next plan is none of this one.
        runtime.on_trial = False
        if runtime.recovery.since is None:
            runtime.recovery.since = runtime.control.heard.broken_at() or time.time()
        try:
            if isinstance(error, TakenIn):
                _enter_first_epoch(runtime, phases, error.order)
            else:
                _enter_next_epoch(runtime, phases, by_choice=isinstance(error, PlanChange))
        except JobEnded:
            raise  # a fenced worker's epoch stays broken for ever: trying again would never end
        except Exception as next_error:
            error = _spared(runtime, next_error)
            if not isinstance(error, TooLittleMemory) and not _is_an_interruption(error):
                # Once it may be what the end of the epoch has led to; a bug would be tried for ever.
                if (strike := _strike(error)) in struck:
                    raise
                struck.add(strike)
            continue
        runtime.recovery.phases, runtime.recovery.ran_out = phases, False
        return


def _spared(runtime: Runtime, error: Exception) -> Exception:
    """The error, or what stands for it if the device's memory ran out and a way that takes less is left."""
    if not is_out_of_memory(error) or runtime.recovery.ran_out or not runtime.held.succession:
        return error
    print("resihp: too little memory for old and new state together; trying again with the old in host memory:",
          file=sys.stderr)  # fmt: skip
    traceback.print_exception(error)
    _let_go_of_frames(error)
    gc.collect()  # what was half built has cycles
    torch.cuda.empty_cache()
    runtime.recovery.ran_out = True
    return TooLittleMemory(str(error))


def _comes_of_a_break(runtime: Runtime, error: BaseException) -> bool:
    if isinstance(error, JobEnded | ContractBroken | TooLittleMemory):
        return False
    return comes_of_a_break(runtime.control, runtime.job.args.distributed_backend)


def _is_an_interruption(error: BaseException) -> bool:
    return isinstance(error, EpochBroken | StagedError | StoreError) or is_communicator_error(error)


def _strike(error: BaseException) -> tuple[Any, ...]:
    """What an error is, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return (type(error), str(error), *((frame.filename, frame.lineno) for frame in frames[-1:]))


def _let_go_of_frames(error: BaseException | None) -> None:
    """The frames of the broken iteration hold its activations and groups; their memory is needed for the new ones."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _enter_next_epoch(runtime: Runtime, phases: Phases, by_choice: bool) -> None:
    if by_choice:
        with phases.phase("agree"):
            workers = len(runtime.view.plan.members)
            runtime.communicators.await_all_idle(runtime.control.epoch, workers, ALL_IDLE_S)
    with phases.phase("abort"):
        abort_or_die(runtime.communicators.connections.abort)
        leave_overlap()
        forget_ranks()
        tear_down(runtime)
        # Before the report: no survivor's writer writes any more when all have told.
        runtime.saves.drop()
    with phases.phase("agree"):
        runtime.reach("recovery-report")
        record = runtime.progress.record(runtime.calls.in_loop, runtime.calls.position)
        order = runtime.control.report(record, runtime.held.shards, runtime.progress.times())
        if order.commit is not None:
            begun = apply_commit(runtime, order.commit)
            # A worker that leaves by choice does so before anything is computed.
            redone = 0 if by_choice else begun
        _forget_dropped_saves(runtime, order)
        if isinstance(order, EmergencyCheckpointOrder):
            write_emergency_checkpoint(runtime, order)
            end = runtime.control.heard.await_end()
            if not isinstance(end, CoordinatorLost):  # else survivors agree among themselves
                name_if_whole(runtime, order)
            raise end
    _enter(runtime, phases, order, redone)


def _forget_dropped_saves(runtime: Runtime, order: Decision) -> None:
    """One survivor removes what was written of saves that were under way, before any worker saves again."""
    left = order.writers if isinstance(order, EmergencyCheckpointOrder) else order.plan.members
    survivors = [worker for worker in runtime.view.rank_order if worker in left]
    runtime.saves.forget_dropped(remove=survivors[:1] == [runtime.worker])


def _enter_first_epoch(runtime: Runtime, phases: Phases, order: Decision) -> None:
    """A worker that was started anew leaves the world that it started in; it has nothing to say and nothing to redo."""
    if isinstance(order, EmergencyCheckpointOrder):
        raise runtime.control.heard.await_end()
    assert order.commit is not None
    tear_down(runtime)
    stand_at(runtime, order.commit)
    _enter(runtime, phases, order, redone=0)


def _enter(runtime: Runtime, phases: Phases, order: EpochPlan, redone: int) -> None:
    runtime.on_trial = order.on_trial
    runtime.held.succession = None
    try:
        with phases.phase("rebuild"):
            runtime.reach("recovery-rebuild")
            runtime.control.check_reach(order.plan)
            trained = _rebuild(runtime, order)
        with phases.phase("migrate"):
            live, succession = runtime.held.live, runtime.held.succession
            old, to_host = storages(live), bytes_away(live)  # before new objects take over moments
            migrated = runtime.mode.state.migrate(order, trained)
            extra_digests = move_extra_state(runtime, order, trained)
            if succession is not None:
                succession.return_gradients()
                runtime.recovery.footprint = footprint_of(succession.whole, old, to_host, storages(trained))
        with phases.phase("ready"):
            runtime.reach("recovery-ready")
            connections = runtime.communicators.connections
            runtime.control.ready(
                migrated.digests | extra_digests, migrated.received, redone, connections.ports(), migrated.keeps_copies
            )
            connections.narrow(runtime.control.peer_ports)
    except Exception:
        if runtime.held.succession is not None:
            runtime.held.succession.give_up()
        raise
    with phases.phase("data"):
        _adopt(runtime, order, trained, migrated)


def apply_commit(runtime: Runtime, commit: Commit) -> int:
    """Take the committed step if this worker is REDUCED at it; returns how many iterations will be computed again."""
    progress = runtime.progress
    if progress.owes(commit):
        assert commit.outcome is not None
        progress.agreed(commit.outcome)
        take_step(runtime, commit.outcome)
    return int(progress.iteration > commit.iteration)


def _rebuild(runtime: Runtime, order: EpochPlan) -> Trained:
    """Groups of the new plan and, for workers with work, a new model and optimizer. The committed step is taken,
    so the old gradients make room for them."""
    build_world(runtime, order.plan, runtime.preparation.take(order))
    if runtime.view.works:
        with runtime.communicators.meeting_at_once():
            runtime.mode.build_groups()
        meet_before_it(runtime.job.args)
    runtime.communicators.end_hand_over()
    live = runtime.held.live
    if not runtime.view.works:
        if live.away:
            gc.collect()  # what an attempt has half built
            torch.cuda.empty_cache()
        return_to_device(live)
        bring_gradients_back(live)
        return live
    free_gradients(live)
    succession = runtime.held.succession = make_room(runtime, order)
    reset_singletons(runtime, RerunMode(runtime.job.args.rerun_mode))
    trained = runtime.setup.build_trained()
    succession.optimizer_of(trained)
    return trained


def _adopt(runtime: Runtime, order: EpochPlan, trained: Trained, migrated: Migrated) -> None:
    """All members are ready: the new objects take the old ones' place, also in pretrain's own references."""
    live, commit = runtime.held.live, order.commit
    assert commit is not None
    runtime.probes.abandon()
    runtime.pads.begin_epoch()
    runtime.held.kept, runtime.held.experts = migrated.kept, migrated.experts
    runtime.held.succession = None
    runtime.held.extra.adopt()
    host_memory_of(torch.device("cuda")).give_back()
    if trained is not live:
        old_model = list(live.model)
        live.model[:] = trained.model
        live.lacks_gradients = False
        live.away.clear()
        become(live.optimizer, trained.optimizer)
        become(live.scheduler, trained.scheduler)
        live.scheduler.optimizer = live.optimizer
        install_step(runtime)
        take_apart(old_model)
    runtime.held.shards = spelled_out(order.plan, runtime.job.own.chunks).shards_of(runtime.worker)
    runtime.calls.in_loop, runtime.joining = runtime.view.works, False
    runtime.calls.position = commit.position
    runtime.orders.change, runtime.orders.validation = False, None
    runtime.log.begin_epoch(runtime.view)
    end_profiling(runtime.job.args, tells=runtime.view.reports)
    restore_counters(runtime, commit.counters)
    runtime.progress.replay = commit.outcome if commit.replay and runtime.view.works else None
    runtime.saves.repeated = commit.iteration if commit.replay or commit.position else None
    if runtime.view.works:
        for feed in runtime.feeds:
            feed.rewind()
        note_in_progress_log(runtime.job.args)
    else:
        _stand_by(runtime, commit)


def _stand_by(runtime: Runtime, commit: Commit) -> None:
    """A standby goes on right after the committed step."""
    runtime.progress.iteration, runtime.progress.stage = commit.iteration, IterationPhase.STEPPED
    if commit.replay:
        assert commit.outcome is not None
        count_again(runtime, commit.outcome)
        count_consumed(runtime)
