# SPDX-License-Identifier: Apache-2.0
"""Simulates ResiHP's Algorithm 1: which replica does a stage's work for which micro-batch when replicas help each
other.

Imports numpy, numba (through `pipeline`) and `plan`. Pure arrays; a "device" is one stage of one replica.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.plan import Migration, PlannedOp, Schedule
from megatron_resihp.plan.schedule import EXPLICIT

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

_NOBODY: Final = -1
_F, _B = int(OpKind.F), int(OpKind.B)


@dataclass(frozen=True, eq=False)
class Stages:
    """The devices of replicas that hold the same layers in the same stages.

    Attributes:
        seconds: of F and of the whole B of one micro-batch, [2, replicas, stages]; ignored for dead devices.
        room: micro-batches whose activations fit on a device, [replicas, stages]; 0 means that it is dead.
        transfers: seconds from a replica's stage to the next stage of another, and back, [stages − 1, replicas,
            replicas].
    """

    seconds: Array
    room: Integers
    transfers: Array


@dataclass(frozen=True, eq=False)
class Migrated:
    """The simulated iteration.

    Attributes:
        executor: the replica that runs each stage of each micro-batch, [stages, micro-batches].
        ops: rows (replica, stage, kind, micro-batch) in the order of their starts.
        makespan: seconds.
    """

    executor: Integers
    ops: Integers
    makespan: float

    def migrations(self, owner: Integers) -> tuple[Migration, ...]:
        """The work that another replica does than the micro-batch's own."""
        moved = np.argwhere(owner[:, np.newaxis] != self.executor.T)
        return tuple(Migration(int(m), int(s), int(self.executor[s, m])) for m, s in moved)

    def schedules(self) -> tuple[Schedule, ...]:
        """The order of ops of each replica."""
        replicas, stages = 1 + int(self.ops[:, 0].max()), len(self.executor)
        orders: list[list[list[PlannedOp]]] = [[[] for _ in range(stages)] for _ in range(replicas)]
        for replica, stage, kind, micro_batch in self.ops.tolist():
            orders[replica][stage].append(PlannedOp("FB"[kind], stage, micro_batch))
        return tuple(Schedule(EXPLICIT, orders=tuple(map(tuple, each))) for each in orders)


def migrate(stages: Stages, owner: Integers, delta: float, ahead: int) -> Migrated:
    """Simulate an iteration, and migrate work of stages that are dead or lag behind.

    Between the F and the B of a stage, each replica keeps at most `ahead` micro-batches more than 1F1B does, within
    memory. A device prefers a B to an F. P[d, i] counts replica d's micro-batches whose F of stage i is done or
    migrated. The algorithm runs whenever P changes or work arrives. It considers the replicas whose stage i is dead or
    busy and has work waiting. Of these, d_min has the smallest P, dead stages first. d_max is the live replica with the
    largest P, less the migrated work that waits there, that has room for one more micro-batch. If (d_min, i) is dead or
    P[d_max, i] − P[d_min, i] > δ, then d_max runs d_min's next waiting work of stage i, and its B later.

    Source: ResiHP, arXiv 2605.06374, Algorithm 1. Where the text leaves it open, this code chooses the order of ops on
    a device, and counts migrated work for the replica that owns the micro-batch, so that the gap closes.

    Args:
        stages: the devices; each stage needs a live one.
        owner: the replica of each micro-batch, [micro-batches].
        delta: δ; if infinite, only the work of dead stages is migrated.
        ahead: micro-batches by which a stage may be ahead of 1F1B.
    """
    executor, ops, makespan = _run(stages.seconds, stages.room, stages.transfers, owner, delta, ahead)
    return Migrated(executor, ops, makespan)


class _State(NamedTuple):
    """An iteration at one point in time. Of devices: [replicas, stages]; of ops: [2 (F, B), stages, micro-batches].

    Attributes:
        room, owner: as given.
        rank: of each micro-batch in its replica.
        executor: the replica that runs a micro-batch's stage, [stages, micro-batches]; NOBODY until it is decided.
        arrival: when an op's inputs arrive, so that it can start; infinite until that is known.
        started: whether an op has started.
        progress: P.
        in_flight: a replica's micro-batches between F and B of a stage, wherever they run, and migrated ones that have
            not started.
        pending: work for other replicas that has not started on a device.
        held: micro-batches whose activations are on a device.
        kind, micro_batch, free: the op that a device runs, and until when; kind is NOBODY if it runs none.
    """

    room: Integers
    owner: Integers
    rank: Integers
    executor: Integers
    arrival: Array
    started: NDArray[np.bool_]
    progress: Integers
    in_flight: Integers
    pending: Integers
    held: Integers
    kind: Integers
    micro_batch: Integers
    free: Array


@compiled
def _begin(room: Integers, owner: Integers) -> _State:
    micro_batches, stages = len(owner), room.shape[1]
    rank = np.zeros(micro_batches, np.int64)
    counted = np.zeros(len(room), np.int64)
    for m in range(micro_batches):
        rank[m] = counted[owner[m]]
        counted[owner[m]] += 1
    arrival = np.full((2, stages, micro_batches), np.inf)
    arrival[_F, 0] = 0.0
    return _State(
        room, owner, rank, np.full((stages, micro_batches), _NOBODY), arrival,
        np.zeros((2, stages, micro_batches), np.bool_), np.zeros_like(room), np.zeros_like(room), np.zeros_like(room),
        np.zeros_like(room), np.full(room.shape, _NOBODY), np.zeros_like(room), np.zeros(room.shape),
    )  # fmt: skip


@compiled
def _run(
    seconds: Array, room: Integers, transfers: Array, owner: Integers, delta: float, ahead: int
) -> tuple[Integers, Integers, float]:
    """Executors, ops and makespan, event by event; an event is (time, replica, stage), where an op may end or start."""
    state = _begin(room, owner)
    ops = np.empty((2 * state.executor.size, 4), np.int64)
    count = 0
    events = [(0.0, 0, 0)]
    for d in range(1, len(room)):
        heappush(events, (0.0, d, 0))
    while len(events) > 0:
        now, d, i = heappop(events)
        if state.kind[d, i] != _NOBODY and state.free[d, i] <= now:
            _end(state, transfers, events, now, d, i)
        limit = room.shape[1] - i + ahead
        _migrate(state, transfers, events, now, i, delta, limit)
        if state.kind[d, i] != _NOBODY or room[d, i] == 0:
            continue
        kind, m = _next_op(state, now, d, i, limit)
        if m == _NOBODY:
            continue
        _start(state, d, i, kind, m)
        state.free[d, i] = now + seconds[kind, d, i]
        heappush(events, (state.free[d, i], d, i))
        ops[count, 0], ops[count, 1], ops[count, 2], ops[count, 3] = d, i, kind, m
        count += 1
    return state.executor, ops[:count], state.free.max()


@compiled
def _end(state: _State, transfers: Array, events: list[tuple[float, int, int]], now: float, d: int, i: int) -> None:
    """End the op that a device ran; the op that needs its result gets it after the transfer."""
    m = state.micro_batch[d, i]
    home = state.owner[m]
    kind = state.kind[d, i]
    state.kind[d, i] = _NOBODY
    if kind == _B:
        state.held[d, i] -= 1
        state.in_flight[home, i] -= 1
        if home != d:
            heappush(events, (now, home, i))
        if i > 0:
            before = state.executor[i - 1, m]
            state.arrival[_B, i - 1, m] = now + transfers[i - 1, before, d]
            heappush(events, (state.arrival[_B, i - 1, m], before, i - 1))
        return
    if d == home:
        state.progress[home, i] += 1
    if i == state.room.shape[1] - 1:
        state.arrival[_B, i, m] = now
    else:
        state.arrival[_F, i + 1, m] = now + transfers[i, d, home]
        heappush(events, (state.arrival[_F, i + 1, m], home, i + 1))


@compiled
def _migrate(
    state: _State,
    transfers: Array,
    events: list[tuple[float, int, int]],
    now: float,
    i: int,
    delta: float,
    limit: int,
) -> None:
    """Algorithm 1 at a stage, until no more work can migrate; `limit` bounds a replica's `in_flight`."""
    while True:
        m = _most_behind(state, now, i, limit)
        if m == _NOBODY:
            return
        lagging = state.owner[m]
        helper = _helper(state, lagging, i)
        if helper == _NOBODY:
            return
        if state.room[lagging, i] > 0 and state.progress[helper, i] - state.progress[lagging, i] <= delta:
            return
        state.executor[i, m] = helper
        state.progress[lagging, i] += 1
        state.in_flight[lagging, i] += 1
        state.pending[helper, i] += 1
        if i > 0:
            # The input that was on its way to d_min goes to d_max instead.
            before = state.executor[i - 1, m]
            detour = transfers[i - 1, before, helper] - transfers[i - 1, before, lagging]
            state.arrival[_F, i, m] = max(now, state.arrival[_F, i, m] + detour)
        heappush(events, (max(now, state.arrival[_F, i, m]), helper, i))


@compiled
def _most_behind(state: _State, now: float, i: int, limit: int) -> int:
    """The next micro-batch of d_min; NOBODY if none waits."""
    found = _NOBODY
    for m in range(len(state.owner)):
        home = state.owner[m]
        if state.started[_F, i, m] or state.executor[i, m] != _NOBODY or state.arrival[_F, i, m] > now:
            continue
        dead = state.room[home, i] == 0
        if state.in_flight[home, i] >= limit or not (dead or state.kind[home, i] != _NOBODY):
            continue
        if found == _NOBODY:
            found = m
            continue
        other = state.owner[found]
        if home == other:
            earlier = state.rank[m] < state.rank[found]
        elif dead != (state.room[other, i] == 0):
            earlier = dead
        else:
            earlier = state.progress[home, i] < state.progress[other, i]
        if earlier:
            found = m
    return found


@compiled
def _helper(state: _State, lagging: int, i: int) -> int:
    """d_max; NOBODY if no replica has room."""
    best = _NOBODY
    for d in range(len(state.room)):
        if d == lagging or state.held[d, i] + state.pending[d, i] >= state.room[d, i]:
            continue
        lead = state.progress[d, i] - state.pending[d, i]
        if best == _NOBODY or lead > state.progress[best, i] - state.pending[best, i]:
            best = d
    return best


@compiled
def _next_op(state: _State, now: float, d: int, i: int, limit: int) -> tuple[int, int]:
    """Kind and micro-batch of a device's next op: the B that arrived first, or the F with the lowest rank."""
    chosen = _NOBODY
    for m in range(len(state.owner)):
        if state.executor[i, m] != d or not state.started[_F, i, m] or state.started[_B, i, m]:
            continue
        arrival = state.arrival[_B, i, m]
        if arrival <= now and (chosen == _NOBODY or arrival < state.arrival[_B, i, chosen]):
            chosen = m
    if chosen != _NOBODY or state.held[d, i] >= state.room[d, i]:
        return _B, chosen
    admits = state.in_flight[d, i] < limit
    for m in range(len(state.owner)):
        if state.started[_F, i, m] or state.arrival[_F, i, m] > now:
            continue
        own = state.executor[i, m] == _NOBODY and state.owner[m] == d and admits
        if (own or state.executor[i, m] == d) and (chosen == _NOBODY or state.rank[m] < state.rank[chosen]):
            chosen = m
    return _F, chosen


@compiled
def _start(state: _State, d: int, i: int, kind: int, m: int) -> None:
    state.started[kind, i, m] = True
    state.kind[d, i] = kind
    state.micro_batch[d, i] = m
    if kind == _F:
        if state.executor[i, m] == d:
            state.pending[d, i] -= 1
        else:
            state.executor[i, m] = d
            state.in_flight[d, i] += 1
        state.held[d, i] += 1
