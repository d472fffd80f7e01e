# SPDX-License-Identifier: Apache-2.0
"""Simulated annealing of a program: ops change places on their device, layers change stages. Imports numpy and numba.

A move takes an op on a critical path past its neighbour (Van Laarhoven, Aarts and Lenstra, Job shop scheduling by
simulated annealing, Operations Research 40 (1992)), or past several. Some moves take any op, and some move a layer over
a stage boundary. Orders in which ops wait in a circle, or in which a device's memory is too small, are rejected.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.pipeline.graph import NONE
from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.pipeline.program import Program
from megatron_resihp.pipeline.search.job import Layout, PipelineJob, before
from megatron_resihp.pipeline.times import Array

Index = NDArray[np.int64]
_F, _B, _W = map(int, OpKind)
_TOLERANCE = 1e-9
_HOTTEST, _COLDEST = 5e-4, 3e-5
"""Temperatures at the beginning and at the end, as shares of the makespan."""
_ANY_OP = 0.2
"""Share of moves that take any op rather than a critical one."""
_FARTHEST = 12
_PATIENCE = 50
"""Rejected moves after which another critical path is chosen."""
NOT_TAKEN = -1.0


class _Work(NamedTuple):
    """The constants of a search.

    Attributes:
        seconds: of the layers before each layer, [devices, 3, layers + 1].
        kept, state: bytes of the layers before each layer, [devices, layers + 1].
        limit: [devices].
        homes: device of each stage.
        row: kind · stages + stage of each cell. A cell is an op: row · micro-batches + micro-batch.
        source: cell of the op of another stage whose result each cell needs; NONE if it needs none.
        wait: seconds of the transfer of that result.
        offsets: where each device's ops begin in `order`, and the end.
        micro_batches: number of micro-batches.
        kept_until_w: share of activations that W frees.
    """

    seconds: Array
    kept: Array
    state: Array
    limit: Array
    homes: Index
    row: Index
    source: Index
    wait: Array
    offsets: Index
    micro_batches: int
    kept_until_w: float


class _State(NamedTuple):
    """The variables of a search.

    Attributes:
        order: cells, device after device.
        position: of each cell in `order`.
        run: for each cell, the last run of the order that ran it.
        cuts: where stages begin, and the end.
        durations: of each kind and stage, [3 · stages].
        sizes: bytes that each stage keeps of a micro-batch.
        room: bytes that each device has for activations.
    """

    order: Index
    position: Index
    run: Index
    cuts: Index
    durations: Array
    sizes: Array
    room: Array


def anneal(
    job: PipelineJob, layout: Layout, program: Program, tries: int, move_layers: float = 0.0, seed: int = 0
) -> tuple[Layout, Program]:
    """The fastest layout and program found on the way; never slower than the given ones.

    Args:
        job: the job.
        layout, program: the start; the program splits the backward and fits into memory.
        tries: number of moves to try.
        move_layers: share of moves that move a layer to the next stage; with 0 the layout stays.
        seed: for the moves.
    """
    if program.stages < 2 or tries < 1:
        return layout, program
    work = _work(job, layout, program)
    state = _state(work, layout, program)
    before = state.order.copy()
    order, cuts = _anneal(work, state, tries, move_layers, seed)
    found = Layout(tuple(cuts.tolist()), layout.homes)
    return found, program if np.array_equal(order, before) else _program(order, work)


def _work(job: PipelineJob, layout: Layout, program: Program) -> _Work:
    stages, micro_batches = program.stages, program.micro_batches
    cells = np.arange(len(OpKind) * stages * micro_batches).reshape(len(OpKind), stages, micro_batches)
    source, wait = np.full(cells.shape, NONE), np.zeros(cells.shape)
    there, back = np.where(np.diff(layout.homes)[:, np.newaxis] != 0, job.hops(layout), 0.0)
    source[_F, 1:], wait[_F, 1:] = cells[_F, :-1], there
    source[_B, :-1], wait[_B, :-1] = cells[_B, 1:], back
    return _Work(
        before(job.seconds), before(job.kept), before(job.state), np.array(job.limit, np.float64),
        np.array(layout.homes), cells.ravel() // micro_batches, source.ravel(), wait.ravel(), program.offsets.copy(),
        micro_batches, job.kept_until_w,
    )  # fmt: skip


def _state(work: _Work, layout: Layout, program: Program) -> _State:
    kind, stage, micro_batch = program.flat.T
    stages = program.stages
    order = (kind * stages + stage) * program.micro_batches + micro_batch
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    durations, sizes = np.zeros(len(OpKind) * stages), np.zeros(stages)
    cuts, room = np.array(layout.cuts), work.limit.copy()
    state = _State(order, position, np.full(len(order), NONE), cuts, durations, sizes, room)
    for each in range(stages):
        _measure(work, state, each, 1.0)
    return state


def _program(order: Index, work: _Work) -> Program:
    stages = len(work.homes)
    row, micro_batch = np.divmod(order, work.micro_batches)
    kind, stage = np.divmod(row, stages)
    kinds = tuple(OpKind)
    ops = [Op(kinds[k], s, m) for k, s, m in zip(kind.tolist(), stage.tolist(), micro_batch.tolist(), strict=True)]
    orders = tuple(tuple(ops[first:end]) for first, end in pairwise(work.offsets.tolist()))
    return Program(orders, tuple(work.homes.tolist()), work.micro_batches, splits_backward=True)


@compiled
def _measure(work: _Work, state: _State, stage: int, sign: float) -> None:
    """Set a stage's durations and size, and take its state from its device's room (sign −1: give it back)."""
    stages, home, first, end = len(work.homes), work.homes[stage], state.cuts[stage], state.cuts[stage + 1]
    for kind in range(3):
        state.durations[kind * stages + stage] = work.seconds[home, kind, end] - work.seconds[home, kind, first]
    state.sizes[stage] = work.kept[home, end] - work.kept[home, first]
    state.room[home] -= sign * (work.state[home, end] - work.state[home, first])


@compiled
def _anneal(work: _Work, state: _State, tries: int, move_layers: float, seed: int) -> tuple[Index, Index]:
    """The best order and cuts found."""
    np.random.seed(seed)
    end, new_end = np.empty(len(state.order)), np.empty(len(state.order))
    path = np.empty(len(state.order), np.int64)
    makespan = _run(work, state, end, np.inf, tries)
    assert makespan >= 0, "the program to begin with can't be run"
    best, best_order, best_cuts = makespan, state.order.copy(), state.cuts.copy()
    critical, refused = 0, _PATIENCE
    for tried in range(tries):
        if refused >= _PATIENCE:
            critical, refused = _critical(work, state, end, path), 0
        temperature = makespan * _HOTTEST * (_COLDEST / _HOTTEST) ** (tried / tries)
        most = makespan - temperature * np.log(1.0 - np.random.random())
        if np.random.random() < move_layers:
            boundary, step = np.random.randint(1, len(state.cuts) - 1), 2 * np.random.randint(2) - 1
            new = _try_layer(work, state, boundary, step, new_end, most, tried)
        else:
            new = _try_op(work, state, path[:critical], new_end, most, tried)
        if new == NOT_TAKEN:
            refused += 1
            continue
        makespan, refused = new, _PATIENCE
        end, new_end = new_end, end
        if makespan < best * (1 - _TOLERANCE):
            best = makespan
            best_order[:], best_cuts[:] = state.order, state.cuts
    return best_order, best_cuts


@compiled
def _try_layer(work: _Work, state: _State, boundary: int, step: int, end: Array, most: float, run: int) -> float:
    """Move a layer over a boundary; returns the makespan, or NOT_TAKEN with everything restored."""
    to = state.cuts[boundary] + step
    if to < state.cuts[boundary - 1] or to > state.cuts[boundary + 1]:
        return NOT_TAKEN
    _cut(work, state, boundary, to)
    makespan = NOT_TAKEN
    if _fits(work, state, work.homes[boundary - 1]) and _fits(work, state, work.homes[boundary]):
        makespan = _run(work, state, end, most, run)
    if makespan == NOT_TAKEN:
        _cut(work, state, boundary, to - step)
    return makespan


@compiled
def _cut(work: _Work, state: _State, boundary: int, to: int) -> None:
    for stage in (boundary - 1, boundary):
        _measure(work, state, stage, -1.0)
    state.cuts[boundary] = to
    for stage in (boundary - 1, boundary):
        _measure(work, state, stage, 1.0)


@compiled
def _try_op(work: _Work, state: _State, critical: Index, end: Array, most: float, run: int) -> float:
    """Move an op past one or more neighbours; returns the makespan, or NOT_TAKEN with everything restored."""
    if len(critical) == 0 or np.random.random() < _ANY_OP:
        first = np.random.randint(len(state.order) - 1)
    else:
        first = critical[np.random.randint(len(critical))]
    device = work.homes[work.row[state.order[first]] % len(work.homes)]
    if first + 1 == work.offsets[device + 1]:
        return NOT_TAKEN
    steps = 1
    while steps < _FARTHEST and np.random.random() < 0.5:
        steps += 1
    if np.random.random() < 0.5:
        source, to = first, min(first + steps, work.offsets[device + 1] - 1)
    else:
        source, to = first + 1, max(first + 1 - steps, work.offsets[device])
    if not _may_pass(work, state, source, to):
        return NOT_TAKEN
    _shift(state, source, to)
    makespan = _run(work, state, end, most, run) if _fits(work, state, device) else NOT_TAKEN
    if makespan == NOT_TAKEN:
        _shift(state, to, source)
    return makespan


@compiled
def _may_pass(work: _Work, state: _State, source: int, to: int) -> bool:
    """Whether the op stays after its own F or B, and before its own B or W."""
    per_kind = len(work.homes) * work.micro_batches
    cell = state.order[source]
    if source < to:
        following = cell + per_kind
        return following >= len(state.position) or not source < state.position[following] <= to
    return cell < per_kind or not to <= state.position[cell - per_kind] < source


@compiled
def _shift(state: _State, source: int, to: int) -> None:
    cell = state.order[source]
    step = 1 if to > source else -1
    for place in range(source, to, step):
        moved = state.order[place + step]
        state.order[place] = moved
        state.position[moved] = place
    state.order[to] = cell
    state.position[cell] = to


@compiled
def _fits(work: _Work, state: _State, device: int) -> bool:
    """Whether the device's activations always fit beside its layers' state."""
    stages, room, live = len(work.homes), state.room[device], 0.0
    order, rows, sizes = state.order, work.row, state.sizes
    change = np.array([1.0, work.kept_until_w - 1.0, -work.kept_until_w])
    for place in range(work.offsets[device], work.offsets[device + 1]):
        row = rows[order[place]]
        kind = 0 if row < stages else (1 if row < 2 * stages else 2)
        live += change[kind] * sizes[row - kind * stages]
        if live > room:
            return False
    return room >= 0.0


@compiled
def _run(work: _Work, state: _State, end: Array, most: float, run: int) -> float:
    """The makespan; fills the end of each cell. NOT_TAKEN if ops wait in a circle or the makespan exceeds `most`.

    Args:
        run: a number that no other run has had.
    """
    # Local names, because taking an array out of a tuple costs as much as running an op.
    order, ran, durations = state.order, state.run, state.durations
    rows, source, wait, offsets = work.row, work.source, work.wait, work.offsets
    following, free, left = offsets[:-1].copy(), np.zeros(len(work.limit)), np.zeros(len(work.limit))
    for row in range(len(durations)):
        left[work.homes[row % len(work.homes)]] += work.micro_batches * durations[row]
    unfinished = len(order)
    moved = True
    while moved:
        moved = False
        for device in range(len(free)):
            now, rest = free[device], left[device]
            place, last = following[device], offsets[device + 1]
            while place < last:
                cell = order[place]
                needed = source[cell]
                if needed != NONE:
                    if ran[needed] != run:
                        break
                    now = max(now, end[needed] + wait[cell])
                    if now + rest > most:
                        return NOT_TAKEN
                duration = durations[rows[cell]]
                now += duration
                rest -= duration
                end[cell] = now
                ran[cell] = run
                place += 1
                moved = True
            unfinished -= place - following[device]
            following[device], free[device], left[device] = place, now, rest
    return free.max() if unfinished == 0 else NOT_TAKEN


@compiled
def _critical(work: _Work, state: _State, end: Array, path: Index) -> int:
    """Fill `path` with places whose op and the next one are on one critical path; returns how many there are."""
    order, length = state.order, 0
    place = np.int64(0)
    for device in range(len(work.limit)):
        last = work.offsets[device + 1] - 1
        if last >= work.offsets[device] and end[order[last]] >= end[order[place]]:
            place = last
    while True:
        cell = order[place]
        row, needed = work.row[cell], work.source[cell]
        device = work.homes[row % len(work.homes)]
        begin = end[cell] - state.durations[row] - _TOLERANCE * end[cell]
        waits = needed != NONE and end[needed] + work.wait[cell] >= begin
        queues = place > work.offsets[device] and end[order[place - 1]] >= begin
        if queues and not (waits and np.random.random() < 0.5):
            place -= 1
            path[length] = place
            length += 1
        elif waits:
            place = state.position[needed]
        else:
            return length
