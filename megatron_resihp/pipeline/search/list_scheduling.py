# SPDX-License-Identifier: Apache-2.0
"""Programs made for given durations: list scheduling of F, B and W under a memory limit. Imports numpy and numba.

The schedule part of AdaPtis (arXiv 2509.23722): ops are placed one by one where they can start first, W fills what
would be bubbles, and no device exceeds its limit of activations. Any assignment of layers to stages, and of stages to
devices, is allowed.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.pipeline.memory import checked_sizes
from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.pipeline.program import Program, ProgramError
from megatron_resihp.pipeline.search.bounds import makespan_lower_bound
from megatron_resihp.pipeline.times import Array, checked_times

Index = NDArray[np.int64]
_F, _B, _W = map(int, OpKind)
_TOLERANCE = 1e-9


class _Policy(NamedTuple):
    """How a device chooses its next op. Of several F it takes the latest stage, of B and W the oldest micro-batch.

    Attributes:
        backward_first: whether B comes before F if both can start.
        least_gap: W runs in a gap of at least this share of its duration, and at the end.
        ahead: how many micro-batches a stage takes into F before their B, as a multiple of what keeps the slowest
            device busy: the time from F to the end of B without any queue, over that device's time per micro-batch.
    """

    backward_first: bool
    least_gap: float
    ahead: float


_POLICIES = [_Policy(*fields) for fields in product((True, False), (0.0, 0.5, 1.0), (np.inf, 3.0, 2.5, 2.0, 1.5, 1.25))]


def list_schedule(
    device_of_stage: Sequence[int],
    durations: ArrayLike,
    transfers: ArrayLike = 0.0,
    limit: ArrayLike = np.inf,
    size: ArrayLike = 1.0,
    kept_until_w: ArrayLike = 1.0,
) -> Program:
    """The fastest program that list scheduling with one of several policies finds.

    A stage runs its micro-batches in order. An F starts only if the device can then still finish all micro-batches that
    it has begun, oldest first, within its limit; so no limit leads to a dead end.

    Args:
        device_of_stage: for each stage, the device that holds it.
        durations, transfers: as in `simulate`; the durations with the full axis of micro-batches.
        limit: of live activations, broadcastable to [devices].
        size, kept_until_w: as in `peak_live_activations`.

    Raises:
        ProgramError: the stages of a device together need more than its limit for one micro-batch.
        ValueError: as in `simulate` and `peak_live_activations`.
    """
    job = _job(device_of_stage, durations, transfers, limit, size, kept_until_w)
    needed_ahead = _needed_ahead(job)
    bound = makespan_lower_bound(device_of_stage, job.ops, job.edges, splits_backward=True)
    best, order = np.inf, np.empty((0, 3), np.int64)
    tried: set[tuple[bool, float, bytes]] = set()
    nothing = _nothing_placed(job)
    for backward_first, least_gap, ahead in _POLICIES:
        # At most all micro-batches can be ahead, so several policies may be the same.
        most_ahead = np.minimum(np.ceil(np.maximum(ahead * needed_ahead, 1.0) - _TOLERANCE), job.sizes.shape[1])
        if (policy := (backward_first, least_gap, most_ahead.tobytes())) in tried:
            continue
        tried.add(policy)
        placed, makespan = _place(job, nothing.copy(), most_ahead, backward_first, least_gap, best)
        if makespan < best:
            best, order = makespan, placed
        if best <= bound * (1 + _TOLERANCE):
            break
    return _program(order, job)


def _job(
    device_of_stage: Sequence[int],
    durations: ArrayLike,
    transfers: ArrayLike,
    limit: ArrayLike,
    size: ArrayLike,
    kept_until_w: ArrayLike,
) -> "_Job":
    given = np.asarray(durations, np.float64)
    home = np.array(device_of_stage, np.int64)
    shape = stages, micro_batches = len(home), given.shape[-1]
    ops, edges = (times[0] for times in checked_times(stages, micro_batches, True, given[np.newaxis], transfers))
    sizes, kept = checked_sizes(shape, size, kept_until_w)
    limits = np.broadcast_to(np.asarray(limit, np.float64), int(home.max()) + 1) * (1 + _TOLERANCE)
    for device, most in enumerate(limits):
        needed = sizes[home == device].sum(axis=0).max(initial=0.0)
        if not needed <= most:
            raise ProgramError(f"device {device} needs {needed:g} for one micro-batch; its limit is {most:g}")
    by_device = np.argsort(home, kind="stable")
    offsets = np.searchsorted(home[by_device], np.arange(len(limits) + 1))
    # Arrays of one kind, whatever the input, since the functions below are compiled for each kind.
    ops, edges = np.ascontiguousarray(ops), np.ascontiguousarray(edges)
    return _Job(home, by_device, offsets, ops, edges, limits, sizes, sizes * kept)


def _program(order: Index, job: "_Job") -> Program:
    home, kinds = job.home.tolist(), tuple(OpKind)
    lists: list[list[Op]] = [[] for _ in job.limits]
    for kind, stage, micro_batch in order.tolist():
        lists[home[stage]].append(Op(kinds[kind], stage, micro_batch))
    return Program(tuple(map(tuple, lists)), tuple(home), job.sizes.shape[1], splits_backward=True)


class _Job(NamedTuple):
    """The work to place: arguments of `list_schedule`; `kept` in units of size.

    Device d holds stages by_device[offsets[d] : offsets[d + 1]], in their order.
    """

    home: Index
    by_device: Index
    offsets: Index
    ops: Array
    edges: Array
    limits: Array
    sizes: Array
    kept: Array


def _needed_ahead(job: _Job) -> Array:
    """[stages] micro-batches between F and the end of B, at the slowest device's pace and without queues."""
    ops, edges = job.ops.mean(axis=2), job.edges.mean(axis=2)
    pace = np.bincount(job.home, ops.sum(axis=0)).max() or 1.0
    hops = np.where(job.home[1:] != job.home[:-1], edges.sum(axis=0), 0.0)
    beyond = np.append(hops[::-1].cumsum()[::-1], 0.0)
    return np.maximum((ops[:_W].sum(axis=0)[::-1].cumsum()[::-1] + beyond) / pace, _TOLERANCE)


class _State(NamedTuple):
    """The ops placed so far.

    Attributes:
        following: [3, stages] the next micro-batch of each kind and stage.
        end: [3, stages, micro-batches], infinite for ops that are not placed.
        free: [devices] when each device finishes the ops placed on it.
        live: [devices, micro-batches] what each device holds of each micro-batch.
        ahead: [devices, micro-batches] what F ops that are not placed will add to it.
        left: [devices, micro-batches] number of ops that are not placed.
        oldest: [devices] the first unfinished micro-batch.
        begun: [devices] number of micro-batches begun.
    """

    following: Index
    end: Array
    free: Array
    live: Array
    ahead: Array
    left: Index
    oldest: Index
    begun: Index

    def copy(self) -> "_State":
        return _State._make(each.copy() for each in self)


def _nothing_placed(job: _Job) -> _State:
    devices, (kinds, stages, micro_batches) = len(job.limits), job.ops.shape
    ahead, left = np.zeros((devices, micro_batches)), np.zeros((devices, micro_batches), np.int64)
    np.add.at(ahead, job.home, job.sizes)
    np.add.at(left, job.home, kinds)
    return _State(
        following=np.zeros((kinds, stages), np.int64),
        end=np.full(job.ops.shape, np.inf),
        free=np.zeros(devices),
        live=np.zeros((devices, micro_batches)),
        ahead=ahead,
        left=left,
        oldest=np.zeros(devices, np.int64),
        begun=np.zeros(devices, np.int64),
    )


@compiled
def _place(
    job: _Job, state: _State, most_ahead: Array, backward_first: bool, least_gap: float, limit: float
) -> tuple[Index, float]:
    """All ops as rows (kind, stage, micro-batch) in the order of their starts, and the makespan; fills `state`.

    It gives up, with an infinite makespan, once a device can no longer finish by `limit`. The same holds if it cannot
    finish its F and B in time for the ops of other stages after them.
    """
    devices, stages = len(job.limits), len(job.home)
    home, free, following, durations = job.home, state.free, state.following, job.ops
    rest, without_w, after = np.zeros(devices), np.zeros(devices), np.full(devices, np.inf)
    left_without_w = np.zeros(devices, np.int64)
    tail = 0.0
    for stage in range(stages):
        device = home[stage]
        rest[device] += durations[:, stage].sum()
        without_w[device] += durations[:_W, stage].sum()
        left_without_w[device] += durations[:_W, stage].size
        # The last F or B of a device is a B: its own W comes after it, and the B of the stages before, each with its W.
        tail = max(tail, durations[_W, stage].min())
        after[device] = min(after[device], tail)
        tail += durations[_B, stage].min()
    start = np.empty(devices)
    choice = np.empty((devices, 2), np.int64)
    stale = np.ones(devices, np.bool_)
    order = np.empty((durations.size, 3), np.int64)
    for placed in range(len(order)):
        for device in range(devices):
            if stale[device]:
                start[device], choice[device, 0], choice[device, 1] = _choose(
                    job, state, most_ahead, device, backward_first, least_gap
                )
                stale[device] = False
        device = int(np.argmin(start))
        assert start[device] < np.inf, "no op can be placed"
        least = rest[device]
        if left_without_w[device] > 0:
            least = max(least, without_w[device] + after[device])
        if start[device] + least > limit * (1 + _TOLERANCE):
            return order[:placed], np.inf
        kind, stage = choice[device]
        micro_batch = following[kind, stage]
        order[placed] = kind, stage, micro_batch
        rest[device] -= durations[kind, stage, micro_batch]
        if kind != _W:
            without_w[device] -= durations[kind, stage, micro_batch]
            left_without_w[device] -= 1
        _put(job, state, kind, stage, micro_batch, start[device])
        stale[device] = True
        if kind == _F and stage < stages - 1:
            stale[home[stage + 1]] = True
        if kind == _B and stage > 0:
            stale[home[stage - 1]] = True
    return order, free.max()


@compiled
def _choose(
    job: _Job,
    state: _State,
    most_ahead: Array,
    device: int,
    backward_first: bool,
    least_gap: float,
) -> tuple[float, int, int]:
    """(start, kind, stage) of the device's next op; start is infinite if it must wait for other devices."""
    # Local names, because taking an array out of a tuple costs as much as examining an op.
    home, edges, by_device, following, end = job.home, job.edges, job.by_device, state.following, state.end
    now, micro_batches = state.free[device], job.sizes.shape[1]
    begin_f = begin_b = begin_w = np.inf
    at_f = at_b = at_w = 0
    for place in range(job.offsets[device], job.offsets[device + 1]):
        stage = by_device[place]
        forwards, backwards, weights = following[_F, stage], following[_B, stage], following[_W, stage]
        if forwards < micro_batches and forwards - backwards < most_ahead[stage]:
            ready = max(now, _ready(home, edges, end, _F, stage, forwards))
            # Memory is checked last, because other conditions usually decide before it.
            if ready < np.inf and ready <= begin_f and _fits(job, state, device, stage, forwards):
                begin_f, at_f = ready, stage
        if backwards < forwards:
            ready = max(now, _ready(home, edges, end, _B, stage, backwards))
            if ready < begin_b or (ready == begin_b < np.inf and backwards < following[_B, at_b]):
                begin_b, at_b = ready, stage
        if weights < backwards:
            ready = max(now, _ready(home, edges, end, _W, stage, weights))
            if ready < begin_w or (ready == begin_w < np.inf and weights < following[_W, at_w]):
                begin_w, at_w = ready, stage
    backward = begin_b < begin_f or (backward_first and begin_b == begin_f)
    begin, kind, at = (begin_b, _B, at_b) if backward else (begin_f, _F, at_f)
    if begin_w < np.inf:
        gap = begin - now
        if gap > 0 and gap >= least_gap * job.ops[_W, at_w, following[_W, at_w]]:
            begin, kind, at = begin_w, _W, at_w
    return begin, kind, at


@compiled
def _ready(home: Index, edges: Array, end: Array, kind: int, stage: int, micro_batch: int) -> float:
    """When an op's inputs are all on its device; infinite if an input is not placed yet."""
    if kind == _W:
        return end[_B, stage, micro_batch]
    source = stage - 1 if kind == _F else stage + 1
    ready = 0.0 if kind == _F else end[_F, stage, micro_batch]
    if 0 <= source < len(home):
        arrival = end[kind, source, micro_batch]
        if home[source] != home[stage]:
            arrival += edges[kind, min(source, stage), micro_batch]
        ready = max(ready, arrival)
    return ready


@compiled
def _fits(job: _Job, state: _State, device: int, stage: int, micro_batch: int) -> bool:
    """Whether, after this F, all micro-batches begun can be finished within the limit, oldest first."""
    limit, size = job.limits[device], job.sizes[stage, micro_batch]
    if limit == np.inf:
        return True
    live, ahead, oldest, begun = state.live[device], state.ahead[device], state.oldest[device], state.begun[device]
    # Other micro-batches hold nothing.
    held = live[oldest:begun].sum() + size
    if held > limit:
        return False
    for other in range(oldest, max(begun, micro_batch + 1)):
        added = size if other == micro_batch else 0.0
        if held + ahead[other] - added > limit:
            return False
        held -= live[other] + added
    return True


@compiled
def _put(job: _Job, state: _State, kind: int, stage: int, micro_batch: int, start: float) -> None:
    """Place an op."""
    device = job.home[stage]
    size, kept = job.sizes[stage, micro_batch], job.kept[stage, micro_batch]
    state.end[kind, stage, micro_batch] = start + job.ops[kind, stage, micro_batch]
    state.free[device] = state.end[kind, stage, micro_batch]
    state.following[kind, stage] += 1
    if kind == _F:
        state.ahead[device, micro_batch] -= size
        state.live[device, micro_batch] += size
        state.begun[device] = max(state.begun[device], micro_batch + 1)
    else:
        state.live[device, micro_batch] -= size - kept if kind == _B else kept
    state.left[device, micro_batch] -= 1
    if state.left[device, micro_batch] == 0:
        state.live[device, micro_batch] = state.ahead[device, micro_batch] = 0.0
    while state.oldest[device] < state.left.shape[1] and state.left[device, state.oldest[device]] == 0:
        state.oldest[device] += 1
