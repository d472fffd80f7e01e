# SPDX-License-Identifier: Apache-2.0
"""Workers and nodes: which start, wait, die, leave, and what each of them holds.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from typing import Annotated

from megatron_resihp.events.event import Event, event


@event("worker_started", written_by="each worker")
class WorkerStarted(Event):
    """A worker knows its device, before it joins others."""

    host: Annotated[str, "name of its machine"]
    node: Annotated[int, "its node's rank"]
    local_rank: Annotated[int, "its place on the node"]
    pid: Annotated[int, "its process"]
    gpu: Annotated[int | None, "index of its GPU on the machine; null: none, or not known"] = None
    gpu_uuid: Annotated[str | None, "what `nvidia-smi -L` calls it"] = None
    gpu_name: Annotated[str | None, "its model"] = None


@event("worker_dead", written_by="coordinator")
class WorkerDead(Event):
    """A worker was declared dead."""

    dead: Annotated[int, "the worker"]
    node: Annotated[int | str | None, "its node"] = None
    cause: Annotated[
        str,
        '"exit signal 9", "no heartbeat for 5.0 s", "connection lost", "fenced itself" (it was cut off and ended), '
        '"did not hear within 10.1 s that the epoch is broken", "did not report within 60 s", "node lost: …"; of one '
        'not taken in yet also why it ended. Where that is known, first why: "fault injection, …", "out-of-memory '
        'killer, …", or its last words',
    ]
    died_at: Annotated[float | None, "best known time of death, in Unix seconds"] = None
    noticed_at: Annotated[float | None, "when the coordinator knew"] = None


@event("worker_failed", written_by="coordinator")
class WorkerFailed(Event):
    """A worker raised an error that is no communication failure."""

    failed: Annotated[int, "the worker"]
    error: Annotated[str, "its error"]


@event("worker_restarted", written_by="coordinator")
class WorkerRestarted(Event):
    """A worker that died has been restarted, with an id of its own."""

    restarted: Annotated[int, "its id"]
    instead_of: Annotated[int, "the one that died"]


@event("worker_waiting", written_by="coordinator")
class WorkerWaiting(Event):
    """A worker that was not there at the start is ready, holds nothing and waits for a plan that has it in it."""

    waiting: Annotated[int, "the worker"]
    place: Annotated[int, "its slot: the id of the worker that was there first, which may be itself"]


@event("node_left", written_by="coordinator")
class NodeLeft(Event):
    """A node that was told to end has left; no plan has its workers any more."""

    node: Annotated[int, "its rank"]
    left: Annotated[tuple[int, ...], "the workers that it had"]


@event("workers_left", written_by="coordinator")
class WorkersLeft(Event):
    """Workers that were told to leave have left; no plan has them any more. Their nodes stay."""

    left: Annotated[tuple[int, ...], "the workers"]


@event("link_failed", written_by="coordinator")
class LinkFailed(Event):
    """Workers of two nodes could not reach each other twice in a row while all lived; one side is left out."""

    reason: Annotated[str, "which workers can't reach each other"]
    left_out: Annotated[tuple[int, ...], "the workers that the job goes on without"]


@event("resources", written_by="each worker")
class Resources(Event):
    """What it holds after a recovery or change of plan: a leak would show here."""

    to_epoch: Annotated[int, "epoch that holds"]
    threads: Annotated[int, "threads of the process"]
    descriptors: Annotated[int, "its open file descriptors"]
    groups: Annotated[int, "torch's process groups"]
    resident_bytes: Annotated[int, "memory of the process on the host"]
    left_behind: Annotated[int, "groups of earlier epochs that could not be ended yet"]
    bytes_before: Annotated[int | None, "of parameters, gradients and optimizer before a rebuild"] = None
    bytes_new: Annotated[int | None, "of the new ones, what was not taken over from the old"] = None
    bytes_most: Annotated[int | None, "old ones, without gradients, and new ones together, on the device"] = None
    bytes_to_host: Annotated[int | None, "old ones that were in host memory meanwhile"] = None
