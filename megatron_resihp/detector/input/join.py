# SPDX-License-Identifier: Apache-2.0
"""Joins the records of one iteration to its arrays: a pure function. Imports numpy and this package.

**Ops** keep their own durations. The micro-batch axis is the position in the worker's own list of micro-batches, in
growing order of their index in the global batch, so that replicas of a large job do not fill each other's places.

**Transfers** are joined from both sides. The side that posts first waits for the other. So the transfer itself lasts
from the later of the two posts to the receiver's end. The posts come from two clocks. On one machine these are the same
clock. Between machines, the receiver's end minus the sender's post is D + θ in one direction and D' − θ in the other,
where θ is the offset of the clocks. The shortest transfers of both directions have D = D' (no waits, the same number of
bytes). Hence θ = (least forward − least backward) / 2, as in NTP (RFC 5905, section 8). The median over the links of
the two machines is used, so that one slow link does not move the clocks.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.input.counters import Counters
from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord, OpKind, SpanKind
from megatron_resihp.detector.judging.units import tensor_groups

SLACK_S: Final = 1e-4
"""Largest contradiction between times of one record: events are not read at exactly the same moment."""
_MICRO_BATCHES = 1 << 16

_Rows = tuple[NDArray[np.int64], NDArray[np.void]]
"""For each entry the row of its worker, and the entries."""


class Joiner:
    """Joins the records of an epoch's workers."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._count = len(layout.workers)
        self._group = tensor_groups(layout)
        self._by_group = np.argsort(self._group, kind="stable")
        self._begin_of_group = np.flatnonzero(np.diff(self._group[self._by_group], prepend=-1))
        self._rows = {int(worker): row for row, worker in enumerate(layout.workers)}
        self._by_id = np.argsort(layout.workers)
        self._ids = layout.workers[self._by_id]
        ends = np.sort(self.rows_of(layout.links)[0], axis=1)
        keys = ends[:, 0] * self._count + ends[:, 1]
        low, high = layout.node[ends[:, 0]], layout.node[ends[:, 1]]
        self._machines = low, high
        """Machines of each link's ends, the smaller row first."""
        pairs = np.minimum(low, high) * (int(layout.node.max(initial=0)) + 1) + np.maximum(low, high)
        self._pair_of_machines = np.unique(pairs, return_inverse=True)[1]
        self._by_key = np.argsort(keys)
        self._link_keys = keys[self._by_key]

    def row_of(self, worker: int) -> int | None:
        """The worker's index in the layout; None if it has no work."""
        return self._rows.get(worker)

    def rows_of(self, workers: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Indices in the layout of worker ids, in any shape, and whether the layout has them."""
        return _look_up(self._ids, self._by_id, workers)

    def join(self, iteration: int, records: Sequence[IterationRecord], counters: Counters) -> IterationObservations:
        """The arrays of one iteration, from at most one record of each worker of the layout."""
        rows = np.array([self._rows[record.worker] for record in records], dtype=np.int64)
        seconds = np.full(self._count, np.nan)
        seconds[rows] = [record.end - record.start for record in records]
        counters.bad_times += int((~(seconds[rows] > 0)).sum())
        seconds[~(seconds > 0)] = np.nan
        reported = np.zeros(self._count, dtype=np.bool_)
        reported[rows] = True
        spans = _concatenate(rows, [record.spans for record in records], SPAN)
        compute, waited, tokens, squares = self._ops(rows, records, seconds, spans, counters)
        transfer, size = self._transfers(rows, records, seconds, counters)
        return IterationObservations(
            epoch=self.layout.epoch, iteration=iteration, compute=compute, waited=waited, tokens=tokens,
            squares=squares, transfer=transfer, transfer_bytes=size,
            spans=self._spans(rows, spans, counters), seconds=seconds, reported=reported,
        )  # fmt: skip

    def _ops(
        self,
        rows: NDArray[np.int64],
        records: Sequence[IterationRecord],
        seconds: NDArray[np.float64],
        spans: _Rows,
        counters: Counters,
    ) -> tuple[NDArray[np.float64], ...]:
        op_rows, ops = _concatenate(rows, [record.ops for record in records], OP)
        load_rows, load = _concatenate(rows, [record.workload for record in records], WORKLOAD)
        duration = _durations(ops, seconds[op_rows], ops["kind"] <= max(OpKind), counters)
        keys = np.concatenate([op_rows, load_rows]) * _MICRO_BATCHES
        keys += np.concatenate([ops["micro_batch"], load["micro_batch"]])
        found, inverse = np.unique(keys, return_inverse=True)
        owner = found // _MICRO_BATCHES
        position = np.arange(len(found)) - np.searchsorted(owner, owner)
        width = int(position.max()) + 1 if len(found) else 0
        chunks = int(ops["chunk"].max()) + 1 if len(ops) else 1
        compute = np.full((self._count, len(OpKind), chunks, width), np.nan)
        waited = np.full_like(compute, np.nan)
        kind = np.minimum(ops["kind"], max(OpKind))
        place = (op_rows, kind, ops["chunk"], position[inverse[: len(ops)]])
        compute[place] = duration
        waits = ops["waited"].astype(np.float64)
        with np.errstate(invalid="ignore"):
            waited[place] = np.where((waits >= 0) & (waits <= duration + SLACK_S), np.minimum(waits, duration), np.nan)
        seconds_absent = _absences(op_rows, ops, spans)
        if seconds_absent is not None:
            absent = np.zeros_like(compute)
            absent[place] = seconds_absent
            self._blame_absences(absent, waited)
        features = self._workload(found, load, inverse[len(ops) :])
        tokens, squares = (np.full((self._count, width), np.nan) for _ in range(2))
        tokens[owner, position], squares[owner, position] = features
        return compute, waited, self._of_group(tokens), self._of_group(squares)

    def _of_group(self, load: NDArray[np.float64]) -> NDArray[np.float64]:
        """[workers, micro-batches] the largest of each stage's members. Replicas that share sequences or experts count
        as one here: each has micro-batches of its own, and waits in every layer for the one with most work."""
        if not load.size:
            return load
        most = np.fmax.reduceat(load[self._by_group], self._begin_of_group)
        return np.where(np.isnan(load), np.nan, most[self._group])

    def _blame_absences(self, absent: NDArray[np.float64], waited: NDArray[np.float64]) -> None:
        """Remove from `waited` the time in which a worker was stopped while all others of its group waited for it."""
        for row in np.flatnonzero(absent.any(axis=(1, 2, 3))):
            others = (self._group == self._group[row]) & (np.arange(self._count) != row)
            if others.any():
                held_up = np.nan_to_num(waited[others]).min(axis=0)
                waited[row] -= np.minimum(np.minimum(absent[row], held_up), np.nan_to_num(waited[row]))

    def _workload(
        self, keys: NDArray[np.int64], load: NDArray[np.void], place: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """N and Σ l² of each (worker, micro-batch) key; if a worker gave none, another worker's of its replica."""
        tokens, squares = np.full(len(keys), np.nan), np.full(len(keys), np.nan)
        known = np.isfinite(load["tokens"]) & np.isfinite(load["squares"]) & (load["tokens"] >= 0)
        tokens[place[known]], squares[place[known]] = load["tokens"][known], load["squares"][known]
        unknown = np.isnan(tokens)
        if unknown.any() and not unknown.all():
            shared = self.layout.replica[keys // _MICRO_BATCHES] * _MICRO_BATCHES + keys % _MICRO_BATCHES
            said, first = np.unique(shared[~unknown], return_index=True)
            row, there = _look_up(said, np.arange(len(said)), shared[unknown])
            for values in (tokens, squares):
                values[unknown] = np.where(there, values[~unknown][first[row]], np.nan)
        return tokens, squares

    def _spans(self, rows: NDArray[np.int64], found: _Rows, counters: Counters) -> NDArray[np.float64]:
        span_rows, spans = found
        # Evaluations and saves come between iterations and may last longer than one iteration.
        duration = _durations(spans, np.full(len(spans), np.inf), spans["kind"] <= max(SpanKind), counters)
        usable = np.isfinite(duration)
        kinds = len(SpanKind)
        place = span_rows[usable] * kinds + spans["kind"][usable]
        total = np.bincount(place, weights=duration[usable], minlength=self._count * kinds)
        result = total.astype(np.float64).reshape(self._count, kinds)
        result[np.setdiff1d(np.arange(self._count), rows)] = np.nan
        for row in np.unique(place[spans["kind"][usable] == SpanKind.ABSENT] // kinds):
            own = spans[usable & (span_rows == row)]
            result[row, SpanKind.DATA] -= _shared(own, SpanKind.DATA, SpanKind.ABSENT)
        return result

    def _transfers(
        self,
        rows: NDArray[np.int64],
        records: Sequence[IterationRecord],
        seconds: NDArray[np.float64],
        counters: Counters,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        own, sides = _concatenate(rows, [record.transfers for record in records], TRANSFER)
        peer, known = self.rows_of(sides["peer"])
        link, linked = _look_up(
            self._link_keys, self._by_key, np.minimum(own, peer) * self._count + np.maximum(own, peer)
        )
        usable = known & linked & (sides["kind"] <= max(OpKind))
        received = sides["received"] == 1
        source, target = np.where(received, peer, own), np.where(received, own, peer)
        lane = (link * 2 + (source > target)) * len(OpKind) + sides["kind"]
        group = lane * _MICRO_BATCHES + sides["micro_batch"]
        sent_at, got_at = _pair(group, sides["chunk"], usable & ~received, usable & received)
        counters.unpaired += len(sides) - len(sent_at) - len(got_at)
        sent, got, link = sides[sent_at], sides[got_at], link[got_at]
        source, target = source[got_at], target[got_at]
        shift = self._shift(link, source, target, got["done"] - sent["posted"])
        with np.errstate(invalid="ignore"):
            duration = got["done"] - np.maximum(sent["posted"] + shift, got["posted"])
            limit = np.fmax(seconds[source], seconds[target])
            possible = (duration > -SLACK_S) & (duration <= limit + SLACK_S)
            untimed = np.isnan(got["done"])
            duration = np.where(possible & (duration > 0), duration, np.nan)
        counters.unsynchronised += int(np.isnan(shift).sum())
        counters.bad_transfers += int((~possible & ~untimed & ~np.isnan(shift)).sum())
        position = np.arange(len(link)) - np.searchsorted(link, link)
        width = int(position.max()) + 1 if len(link) else 0
        transfer, size = (np.full((len(self.layout.links), width), np.nan) for _ in range(2))
        transfer[link, position], size[link, position] = duration, sent["bytes"]
        return transfer, size

    def _shift(
        self,
        link: NDArray[np.int64],
        source: NDArray[np.int64],
        target: NDArray[np.int64],
        transit: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """How far the receiver's clock is ahead of the sender's, for each transfer, in the order of links."""
        node = self.layout.node
        far = node[source] != node[target]
        shift = np.zeros(len(link))
        if not far.any():
            return shift
        least = np.full(2 * len(self.layout.links), np.inf)
        usable = far & np.isfinite(transit)
        np.minimum.at(least, (2 * link + (source > target))[usable], transit[usable])
        with np.errstate(invalid="ignore"):
            theta = (least[0::2] - least[1::2]) / 2  # what the clock at the end with the larger row shows more
        low, high = self._machines
        theta = np.where(low < high, theta, -theta)
        offset = _group_medians(theta, self._pair_of_machines)[self._pair_of_machines]
        shift[far] = np.where(node[source[far]] < node[target[far]], offset[link[far]], -offset[link[far]])
        return shift


def _concatenate(
    rows: NDArray[np.int64], arrays: Sequence[NDArray[np.void]], dtype: np.dtype[np.void]
) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """All entries, and the row of each."""
    counts = [len(array) for array in arrays]
    data = b"".join([array.tobytes() for array in arrays])
    return np.repeat(rows, counts), np.frombuffer(data, dtype)


def _absences(op_rows: NDArray[np.int64], ops: NDArray[np.void], found: _Rows) -> NDArray[np.float64] | None:
    """For each op, the seconds in which its worker's process was stopped; None if none was, as in healthy jobs."""
    span_rows, spans = found
    stopped = spans["kind"] == SpanKind.ABSENT
    if not stopped.any():
        return None
    absent = np.zeros(len(ops))
    for row in np.unique(span_rows[stopped]):
        own = op_rows == row
        absent[own] = _overlaps(ops[own], spans[stopped & (span_rows == row)]).sum(axis=1)
    return absent


def _shared(spans: NDArray[np.void], one: SpanKind, other: SpanKind) -> float:
    """Seconds that lie in spans of both kinds; spans of one kind do not overlap each other."""
    return float(_overlaps(spans[spans["kind"] == one], spans[spans["kind"] == other]).sum())


def _overlaps(one: NDArray[np.void], other: NDArray[np.void]) -> NDArray[np.float64]:
    """[one, other] seconds that they have in common."""
    both = np.minimum(one["end"][:, None], other["end"]) - np.maximum(one["start"][:, None], other["start"])
    return np.maximum(np.nan_to_num(both), 0.0)


def _durations(
    entries: NDArray[np.void], limit: NDArray[np.float64], known: NDArray[np.bool_], counters: Counters
) -> NDArray[np.float64]:
    """End minus start; impossible durations are counted and become NaN."""
    with np.errstate(invalid="ignore"):
        duration = entries["end"] - entries["start"]
        possible = known & (duration >= 0) & ~(duration > limit + SLACK_S)
    counters.bad_times += int((~possible).sum())
    return np.where(possible, duration, np.nan)


def _pair(
    group: NDArray[np.int64], chunk: NDArray[np.uint8], sent: NDArray[np.bool_], received: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of both sides of each transfer, in order of groups.

    A transfer from the last stage to the first one changes its chunk. Within a group (link, direction, kind and
    micro-batch), the n-th chunk of the sender goes to the n-th chunk of the receiver.
    """
    order = np.argsort(group * 256 + chunk, kind="stable")
    senders, receivers = order[sent[order]], order[received[order]]
    if not np.array_equal(group[senders], group[receivers]):
        # Some sides are missing: only groups with equal numbers of senders and receivers can be paired.
        names, of_side = np.unique(group, return_inverse=True)
        counts = [np.bincount(of_side[side], minlength=len(names)) for side in (senders, receivers)]
        whole = (counts[0] == counts[1])[of_side]
        senders, receivers = senders[whole[senders]], receivers[whole[receivers]]
    return senders, receivers


def _look_up(
    ordered: NDArray[np.int64], value: NDArray[np.int64], keys: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The value of each key (arbitrary if there is none), and whether there is one."""
    if not len(ordered):
        return np.zeros(keys.shape, np.int64), np.zeros(keys.shape, np.bool_)
    at = np.minimum(np.searchsorted(ordered, keys), len(ordered) - 1)
    return value[at], ordered[at] == keys


def _group_medians(values: NDArray[np.float64], group: NDArray[np.int64]) -> NDArray[np.float64]:
    """[groups] median of each group's finite values, NaN if there is none; groups are numbered from 0."""
    groups = int(group.max()) + 1 if len(group) else 0
    values = np.where(np.isfinite(values), values, np.inf)
    ordered = values[np.lexsort((values, group))]
    size = np.bincount(group, minlength=groups)
    count = np.bincount(group, np.isfinite(values), groups).astype(np.int64)
    first = np.cumsum(size) - size
    low, high = (ordered[first + place] for place in (np.maximum(count - 1, 0) // 2, count // 2))
    return np.where(count > 0, (low + high) / 2, np.nan)
