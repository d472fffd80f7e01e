# SPDX-License-Identifier: Apache-2.0
"""Orders ops for pipelines that help each other: list scheduling of F, B and W.

Imports numpy, numba and this package.

Each micro-batch takes its own path through the devices, one for each stage. List scheduling with several policies
replaces the solver of ReCycle (Gandhi et al., SOSP 2024, arXiv 2405.14009). It puts re-routed work into bubbles, and W,
decoupled from B, gives way to ops that other devices wait for.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.times import Array

Index = NDArray[np.int64]
_F, _B, _W = map(int, OpKind)


class Ways(NamedTuple):
    """Paths of micro-batches through devices that run the ops of one stage each.

    Attributes:
        device: the device that runs each stage of each micro-batch, [stages, micro-batches].
        stage: of each device, [devices].
        seconds: of F, B and W on each device, [3, devices].
        transfers: seconds that a result takes from a stage to the next or back, [stages − 1, micro-batches].
        most_live: micro-batches whose activations each device can keep from F to W, [devices].
    """

    device: Index
    stage: Index
    seconds: Array
    transfers: Array
    most_live: Index


class _Queues(NamedTuple):
    """The work of each device: its micro-batches are waiting[first[d] : first[d + 1]], in order."""

    waiting: Index
    first: Index


class _State(NamedTuple):
    """end of each op, [3, stages, micro-batches], infinite if not placed; free and done, [devices] and [3, devices]."""

    end: Array
    free: Array
    done: Index


_AHEAD = (1.0, 1.5, 2.0, np.inf)
_POLICIES = [(True, 0.5), (True, 1.0), (False, 0.0), (False, 0.5), (False, 1.0)]
"""Whether B comes before F, and the least gap for W as a share of its duration, beside (True, 0)."""


def order_ops(ways: Ways) -> tuple[list[list[Op]], float]:
    """The order of ops on each device that ends first among all policies, and its end.

    Policies differ in three ways. The first is how many micro-batches a device takes into F before their B, as a
    multiple of 1F1B's; it is decided first. The second is whether F or B comes first if both can start. The third is
    the least gap for W.

    Raises:
        ProgramError: a device with work cannot keep the activations of one micro-batch.
    """
    stages, micro_batches = ways.device.shape
    load = np.bincount(ways.device.ravel(), minlength=len(ways.stage))
    short = np.flatnonzero((load > 0) & (ways.most_live < 1))
    if len(short):
        raise ProgramError(f"a device of stage {ways.stage[short[0]]} can't keep the activations of one micro-batch")
    queues = _Queues(np.argsort(ways.device, axis=None, kind="stable") % micro_batches, np.append(0, load.cumsum()))
    usual = (stages - ways.stage) * np.maximum(load / max(load.min(initial=0, where=load > 0) or 1, 1), 1.0)

    def tried(ahead: float, backward_first: bool = True, least_gap: float = 0.0) -> tuple[float, Index]:
        rows, makespan = _place(ways, queues, _nothing_done(ways), np.ceil(ahead * usual), backward_first, least_gap)
        return makespan, rows

    best_ahead = min(((ahead, *tried(ahead)) for ahead in _AHEAD), key=itemgetter(1))
    others = (tried(best_ahead[0], *policy) for policy in _POLICIES)
    makespan, rows = min((best_ahead[1:], *others), key=itemgetter(0))
    return _by_device(rows, ways), float(makespan)


def _nothing_done(ways: Ways) -> _State:
    return _State(
        np.full((len(OpKind), *ways.device.shape), np.inf),
        np.zeros(len(ways.stage)),
        np.zeros((len(OpKind), len(ways.stage)), np.int64),
    )


def _by_device(rows: Index, ways: Ways) -> list[list[Op]]:
    orders: list[list[Op]] = [[] for _ in ways.stage]
    devices: Sequence[int] = ways.device[rows[:, 1], rows[:, 2]].tolist()
    for device, (kind, stage, micro_batch) in zip(devices, rows.tolist(), strict=True):
        orders[device].append(Op(OpKind(kind), stage, micro_batch))
    return orders


@compiled
def _place(
    ways: Ways, queues: _Queues, state: _State, most_ahead: Array, backward_first: bool, least_gap: float
) -> tuple[Index, float]:
    """All ops as rows (kind, stage, micro-batch) in the order of their starts, and the makespan; fills `state`."""
    stages, micro_batches = ways.device.shape
    order = np.empty((3 * stages * micro_batches, 3), np.int64)
    choices = np.zeros((len(ways.stage), 2), np.int64)
    version = np.zeros(len(ways.stage), np.int64)
    # The next op of each device, by start; entries of an older version are void.
    upcoming = [(0.0, device, 0) for device in range(len(ways.stage))]
    stale = np.empty(2, np.int64)
    for device in range(len(ways.stage)):
        start, kind, micro_batch = _choose(ways, queues, state, most_ahead[device], device, backward_first, least_gap)
        choices[device] = kind, micro_batch
        upcoming[device] = (start, device, 0)
    heapify(upcoming)
    for placed in range(len(order)):
        start, device, entry = heappop(upcoming)
        while entry != version[device]:
            start, device, entry = heappop(upcoming)
        assert start < np.inf, "no op can be placed"
        kind, micro_batch = choices[device]
        stage = ways.stage[device]
        order[placed] = kind, stage, micro_batch
        state.free[device] = start + ways.seconds[kind, device]
        state.end[kind, stage, micro_batch] = state.free[device]
        state.done[kind, device] += 1
        stale[:] = device
        if kind == _F and stage < stages - 1:
            stale[1] = ways.device[stage + 1, micro_batch]
        if kind == _B and stage > 0:
            stale[1] = ways.device[stage - 1, micro_batch]
        for other in stale if stale[1] != device else stale[:1]:
            start, kind, micro_batch = _choose(ways, queues, state, most_ahead[other], other, backward_first, least_gap)
            choices[other] = kind, micro_batch
            version[other] += 1
            heappush(upcoming, (start, other, version[other]))
    return order, state.free.max()


@compiled
def _choose(
    ways: Ways,
    queues: _Queues,
    state: _State,
    most_ahead: float,
    device: int,
    backward_first: bool,
    least_gap: float,
) -> tuple[float, int, int]:
    """(start, kind, micro-batch) of a device's next op; start is infinite if it must wait for other devices."""
    stage, now = ways.stage[device], state.free[device]
    begin = np.full(3, np.inf)
    which = np.zeros(3, np.int64)
    live = state.done[_F, device] - state.done[_W, device]
    ahead = state.done[_F, device] - state.done[_B, device]
    takes_more = live < ways.most_live[device] and ahead < most_ahead
    for place in range(queues.first[device], queues.first[device + 1]):
        micro_batch = queues.waiting[place]
        kind = _next_kind(state, stage, micro_batch)
        if kind > _W or (kind == _F and not takes_more):
            continue
        ready = max(now, _ready(ways, state, kind, stage, micro_batch))
        if ready < begin[kind]:
            begin[kind], which[kind] = ready, micro_batch
    if backward_first:
        kind = _B if begin[_B] <= begin[_F] else _F
    else:
        kind = _B if begin[_B] < begin[_F] else _F
    gap = begin[kind] - now
    if begin[_W] < np.inf and gap > 0 and gap >= least_gap * ways.seconds[_W, device]:
        kind = _W
    return begin[kind], kind, which[kind]


@compiled
def _next_kind(state: _State, stage: int, micro_batch: int) -> int:
    """The next op of a micro-batch in a stage; above W if all its ops are placed."""
    kind = 0
    while kind < 3 and state.end[kind, stage, micro_batch] < np.inf:
        kind += 1
    return kind


@compiled
def _ready(ways: Ways, state: _State, kind: int, stage: int, micro_batch: int) -> float:
    """When an op's inputs from other stages have arrived; infinite if an input is not placed yet."""
    source = stage - 1 if kind == _F else stage + 1
    if kind == _W or source < 0 or source == len(ways.device):
        return 0.0
    return state.end[kind, source, micro_batch] + ways.transfers[min(source, stage), micro_batch]
