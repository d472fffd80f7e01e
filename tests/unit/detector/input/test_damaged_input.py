# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives, the detector goes on: records lost, repeated or damaged, clocks that jump."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resihp.detector.input.assemble import Assembler
from megatron_resihp.detector.input.layout import layout_of
from megatron_resihp.detector.input.observations import Layout
from megatron_resihp.detector.input.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord, OpKind, SpanKind
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.verdict import Change, Kind
from megatron_resihp.plan.parallel_plan import ParallelPlan, Replica

PLAN = ParallelPlan((Replica(((0,), (1,)), (0, 2, 4, 6, 7)), Replica(((2,), (3,)), (1, 3, 5))))
LAYOUT = layout_of(PLAN, 0, dict.fromkeys(range(4), 0))
QUICK = Settings(warm_up=12, skipped=1, settling=4)


def record(worker: int, iteration: int, epoch: int = 0) -> IterationRecord:
    """A worker of a pipeline of two stages; the second replica runs fewer micro-batches than the first."""
    random = np.random.default_rng((worker, iteration))
    indices = np.array([0, 2, 4, 6, 7] if worker < 2 else [1, 3, 5])
    count, start = len(indices), 10.0 * iteration
    ops, transfers = np.zeros(2 * count, OP), np.zeros(2 * count, TRANSFER)
    for kind, at in ((OpKind.F, 0.0), (OpKind.B, 0.5)):
        part = slice(kind * count, (kind + 1) * count)
        received = (worker % 2 == 1) == (kind is OpKind.F)
        for entries in (ops, transfers):
            entries["kind"][part], entries["micro_batch"][part] = kind, indices
        ops["start"][part] = start + at + 0.05 * np.arange(count)
        ops["end"][part] = ops["start"][part] + 0.01 * random.normal(1.0, 0.01, count)
        transfers["peer"][part], transfers["received"][part], transfers["bytes"][part] = worker ^ 1, received, 1e6
        transfers["posted"][part] = ops["start"][part] + 0.011
        transfers["done"][part] = transfers["posted"][part] + 0.002 * random.normal(1.0, 0.01, count)
    ops["waited"] = np.nan
    workload = np.zeros(count, WORKLOAD)
    workload["micro_batch"], workload["tokens"], workload["squares"] = indices, 1000, random.uniform(1e5, 1e6, count)
    spans = np.array([(SpanKind.OPTIMIZER, start + 0.8, start + 0.9)], SPAN)
    return IterationRecord(epoch, iteration, worker, 0, start, start + 1.0, ops, transfers, workload, spans)


def damaged(whole: IterationRecord, how: str, random: np.random.Generator) -> Iterator[IterationRecord]:
    """What arrives of a record."""
    ops, transfers, workload = whole.ops.copy(), whole.transfers.copy(), whole.workload.copy()
    some = random.random(len(ops)) < 0.5
    match how:
        case "lost":
            return
        case "repeated":
            yield whole
        case "unknown durations":
            ops["end"][some] = np.nan
        case "unknown workload":
            workload["tokens"] = np.nan
        case "jumping clock":
            ops["end"][some] += random.normal(0.0, 1e6)
            transfers["done"][some] += random.normal(0.0, 1e6)
        case "another iteration":
            whole = replace(whole, iteration=int(random.integers(1, 1 << 31)))
        case "another chunk":
            ops["chunk"][some] = random.integers(0, 4)
        case "other micro-batches":
            ops["micro_batch"][some] = random.integers(0, 1 << 16, int(some.sum()))
        case "no ops":
            ops, transfers = ops[:0], transfers[:0]
        case "cut short":
            ops, transfers, workload = ops[:3], transfers[:1], workload[:1]
    yield replace(whole, ops=ops, transfers=transfers, workload=workload)


DAMAGES = ("lost", "repeated", "unknown durations", "unknown workload", "jumping clock", "another iteration",
           "another chunk", "other micro-batches", "no ops", "cut short")  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 2**32), st.sets(st.sampled_from(DAMAGES), min_size=1), st.sampled_from([0.02, 0.2, 0.6]),
    st.lists(st.integers(2, 39), max_size=3),
)  # fmt: skip
def test_nothing_that_arrives_ends_the_detector(seed: int, how: set[str], share: float, epochs: list[int]) -> None:
    random, kinds = np.random.default_rng(seed), sorted(how)
    assembler, monitor = Assembler(), Monitor(LAYOUT, 0.01, 1000, QUICK)
    assembler.begin(LAYOUT)
    epoch = 0
    for iteration in range(1, 40):
        if iteration in epochs:
            epoch += 1
            layout = replace(LAYOUT, epoch=epoch, links=LAYOUT.links[: random.integers(0, 3)])
            assembler.begin(layout)
            monitor.change_layout(layout)
        for worker in range(4):
            whole = record(worker, iteration, epoch)
            broken = random.random() < share
            for arrived in damaged(whole, random.choice(kinds), random) if broken else [whole]:
                for observations in assembler.add_record(arrived, float(iteration)):
                    monitor.observe(observations)
                    assert 0.0 < monitor.speed(worker) <= 1.0


def observations_of(layout: Layout, first: int, last: int, lost: tuple[int, int]):
    """Iterations of the workers, one record lost."""
    assembler = Assembler()
    assembler.begin(layout)
    for iteration in range(first, last + 1):
        for worker in range(4):
            if (worker, iteration) != lost:
                yield from assembler.add_record(record(worker, iteration, layout.epoch), float(iteration))


@pytest.mark.parametrize("worker", [0, 1, 3])
@pytest.mark.parametrize("iteration", [5, 33])
def test_a_record_lost_while_the_detector_learns_does_no_harm(worker: int, iteration: int) -> None:
    monitor = Monitor(LAYOUT, 0.01, 1000, QUICK)
    verdicts = [each for seen in observations_of(LAYOUT, 1, 30, (worker, iteration)) for each in monitor.observe(seen)]
    later = replace(LAYOUT, epoch=1)
    monitor.change_layout(later)
    for seen in observations_of(later, 31, 60, (worker, iteration)):
        verdicts += monitor.observe(seen)
    assert verdicts == [] and monitor.watching


@pytest.mark.parametrize("kind", [SpanKind.GARBAGE_COLLECTION, SpanKind.EVALUATION, SpanKind.SAVE])
def test_what_is_disturbed_teaches_nothing(small_job, slow_from, kind: SpanKind) -> None:
    """A worker that is disturbed while others are not, in half of the iterations that the detector learns from."""
    job = small_job({3: slow_from(90, 0.9)})
    monitor, verdicts = Monitor(job.layout, 0.01, 1000, Settings(warm_up=30)), []
    for each in job.iterations(120):
        if each.iteration == 51:
            monitor.change_layout(replace(job.layout, epoch=1))
        each = replace(each, epoch=int(each.iteration > 50))
        if each.iteration % 4 and (each.iteration <= 40 or 50 < each.iteration <= 60):
            each.compute[3] *= 1.3
            each.spans[3, kind] = 0.5
        verdicts += monitor.observe(each)
    assert [(each.kind, each.change, each.workers) for each in verdicts] == [(Kind.COMPUTE, Change.ONSET, (3,))]
    assert abs(monitor.speed(3) - 0.9) < 0.02
