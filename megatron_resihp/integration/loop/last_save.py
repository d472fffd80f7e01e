# SPDX-License-Identifier: Apache-2.0
"""The coordinator is lost: survivors agree by files of the run directory and save what they hold (DESIGN contract 6).

What they write is what survivors of a job without a plan write (`integration.loop.emergency_checkpoint`); no wait is
for ever, and the agent ends a worker that hangs. May import megatron and this package's other modules.
"""

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from megatron_resihp.coding import decode, encode
from megatron_resihp.control.coordination.record import NoCommitError
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.node import environment
from megatron_resihp.control.node.mailbox import LAST_SAVE_S
from megatron_resihp.control.worker.noticeboard import Noticeboard
from megatron_resihp.control.worker.saved_state import DIRECTORY, LastSave, iteration_name, latest_in
from megatron_resihp.control.worker.survivors import Decision, Standing, awaited, decide, missing, part_of
from megatron_resihp.integration.emergency.contents import found_groups
from megatron_resihp.integration.loop.device_loss import abort_or_die
from megatron_resihp.integration.loop.emergency_checkpoint import by_stage, name_latest, write_state
from megatron_resihp.integration.loop.recovery import apply_commit
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.world.world import tear_down
from megatron_resihp.plan import Coordinate
from megatron_resihp.plan.slots import node_of
from megatron_resihp.protocol.published import EmergencyCheckpointOrder

TELL_S = 15.0
"""How long survivors wait for each other's records: they learn of the loss at different times."""
SAVE_S = LAST_SAVE_S / 2
"""How long those that have written wait for the others to have."""
RECORD, SAVED = "record", "saved"


def save_without_coordinator(runtime: Runtime, why: str) -> None:
    """Save this worker's part of what the survivors hold, if it holds anything; returns whatever becomes of that."""
    if runtime.joining or not runtime.held.shards or not runtime.progress.iteration:
        return
    try:
        _save(runtime, why)
    except Exception as error:
        traceback.print_exc()
        _say(runtime, f"can't save what it holds: {type(error).__name__}: {error}")


def _save(runtime: Runtime, why: str) -> None:
    abort_or_die(runtime.communicators.connections.abort)
    tear_down(runtime)
    base = Path(os.environ[environment.RUN_DIR])
    # A worker that was cut off alone, in an earlier epoch, must not bind those that went on without it.
    board = Noticeboard(base / DIRECTORY / f"survivors-{runtime.job.run}-{runtime.epoch}", runtime.worker)
    record = runtime.progress.record(runtime.calls.in_loop, runtime.calls.position)
    own = Standing(record, runtime.held.shards, runtime.held.kept is not None, runtime.progress.times())
    board.pin(RECORD, encode(own))
    notes = board.gather(RECORD, _awaited(runtime), TELL_S)
    told = {worker: decode(Standing, note) for worker, note in notes.items()}
    try:
        decision = decode(Decision, board.decide(encode(decide(told, _directory(runtime, base)))))
    except NoCommitError as error:
        _say(runtime, f"saves nothing: {error}")
        return
    shards = part_of(runtime.worker, own, decision)
    if shards is None:
        _save_alone(runtime, own, why, base)
    elif shards and decision.commit.iteration:
        writers = {**decision.writers, runtime.worker: shards}
        order = EmergencyCheckpointOrder(runtime.epoch, why, decision.commit, writers, (), decision.entire)
        _save_share(runtime, decision, order, board, base)


def _save_share(
    runtime: Runtime, decision: Decision, order: EmergencyCheckpointOrder, board: Noticeboard, base: Path
) -> None:
    directory = base / decision.directory
    shard: Coordinate | None = None
    try:
        apply_commit(runtime, decision.commit)
        write_state(runtime, order, directory)
        shard = runtime.held.coordinate if by_stage(runtime, order) else None
    finally:
        board.pin(SAVED, {"shard": shard})
    notes = board.gather(SAVED, decision.writers, SAVE_S)
    saved = {Coordinate(*note["shard"]) for note in notes.values() if note["shard"] is not None}
    save = _what_was_saved(runtime, order, decision, saved, base)
    if save.complete and not save.by_parameter:
        # Only when all shards are there may a later start find them.
        name_latest(directory, decision.commit.iteration)
    if runtime.worker == min(notes):
        save.pin(board)
        _say(runtime, save.told(base))


def _what_was_saved(
    runtime: Runtime, order: EmergencyCheckpointOrder, decision: Decision, saved: set[Coordinate], base: Path
) -> LastSave:
    iteration, own = decision.commit.iteration, runtime.job.own
    if by_stage(runtime, order):
        lacking = missing(saved, own.stages, own.tensor_parallel)
        shards = tuple((each.stage, each.tp_rank) for each in lacking)
        return LastSave(iteration, decision.directory, shards, time.time())
    path = base / decision.directory / iteration_name(iteration)
    with tempfile.TemporaryFile(dir=path):
        pass  # NFS looks at a directory again once this host has changed it.
    written = [group for group in found_groups(base) if group.is_of(runtime.job.run, order.epoch, path)]
    gaps = written[0].gaps if written else ("anything",)
    return LastSave(iteration, decision.directory, (), time.time(), by_parameter=True, gaps=gaps)


def _save_alone(runtime: Runtime, own: Standing, why: str, base: Path) -> None:
    """Iterations are never mixed: what is of another one than the others' is no part of their state."""
    commit = decide({runtime.worker: own}, DIRECTORY).commit
    directory = base / DIRECTORY / f"worker_{runtime.worker}-{runtime.job.run}"
    apply_commit(runtime, commit)
    order = EmergencyCheckpointOrder(runtime.epoch, why, commit, {runtime.worker: own.held}, (), entire=True)
    write_state(runtime, order, directory)
    _say(runtime, f"was after iteration {commit.iteration}, others were not: what it saved is not part of theirs")


def _directory(runtime: Runtime, base: Path) -> str:
    """A complete state of this iteration that is there already, of an earlier run perhaps, stays as it is."""
    reached = {runtime.progress.iteration, runtime.progress.iteration - 1}
    return f"{DIRECTORY}/{runtime.job.run}" if latest_in(base / DIRECTORY) in reached else DIRECTORY


def _awaited(runtime: Runtime) -> frozenset[int]:
    slots, here = int(os.environ[environment.SLOTS]), int(os.environ["LOCAL_WORLD_SIZE"])
    members = {*runtime.control.members, runtime.worker}
    head = JobSize(1, here, apart=environment.APART in os.environ).head
    lost = frozenset(worker for worker in members if node_of(worker, slots, here) in head)
    return awaited(members, lost, runtime.worker)


def _say(runtime: Runtime, what: str) -> None:
    print(f"resihp: worker {runtime.worker}: {what}", file=sys.stderr, flush=True)
