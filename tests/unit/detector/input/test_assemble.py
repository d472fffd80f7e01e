# SPDX-License-Identifier: Apache-2.0
"""Messages of workers become observations of iterations: joined from both sides, in order, whatever is missing."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.detector.input.assemble import Assembler
from megatron_resihp.detector.input.layout import layout_of
from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord, OpKind, SpanKind
from megatron_resihp.detector.input.wire import pack
from megatron_resihp.plan.parallel_plan import ParallelPlan, Replica

MICRO_BATCHES = 4
FORWARD, BACKWARD, TRANSFER_S, SIZE = 0.010, 0.020, 0.002, 1e6


def two_pipelines(node_of: dict[int, int] | None = None) -> Layout:
    """Two replicas of two stages; micro-batches are dealt in turn."""
    plan = ParallelPlan((Replica(((0,), (1,)), (0, 2, 4, 6)), Replica(((2,), (3,)), (1, 3, 5, 7))))
    return layout_of(plan, 0, node_of or dict.fromkeys(range(4), 0))


def record(
    layout: Layout, worker: int, iteration: int, clock: float = 0.0, transfer_s: float = TRANSFER_S, epoch: int = 0
) -> IterationRecord:
    """A worker of a pipeline that runs all forwards, then all backwards; `clock` is what its clock shows too much.

    The second stage receives activations early for the first micro-batch and late for the others, and so on back.
    """
    row = layout.workers.tolist().index(worker)
    stage, peer = int(layout.stage[row]), worker + 1 - 2 * int(layout.stage[row])
    indices = int(layout.replica[row]) + 2 * np.arange(MICRO_BATCHES)
    start = 100.0 * iteration + clock
    ops, transfers = np.zeros(2 * MICRO_BATCHES, OP), np.zeros(2 * MICRO_BATCHES, TRANSFER)
    order = np.arange(MICRO_BATCHES)
    for kind, length, at in ((OpKind.F, FORWARD, 0.0), (OpKind.B, BACKWARD, 0.5)):
        part = slice(kind * MICRO_BATCHES, (kind + 1) * MICRO_BATCHES)
        ops["kind"][part] = transfers["kind"][part] = kind
        ops["micro_batch"][part] = transfers["micro_batch"][part] = indices
        ops["start"][part] = start + at + 0.1 * order
        ops["end"][part] = ops["start"][part] + length * (1 + worker / 10)
        received = (stage == 1) == (kind == OpKind.F)
        # The receiver waits for the first one, and is late for the others.
        posted = at + 0.1 * order + (0.01 if not received else np.where(order == 0, 0.0, 0.03))
        done = at + 0.1 * order + np.where(order == 0, 0.01, 0.03) + transfer_s
        transfers["peer"][part], transfers["received"][part], transfers["bytes"][part] = peer, received, SIZE
        transfers["posted"][part], transfers["done"][part] = start + posted, start + done
    ops["waited"] = np.nan
    workload = np.zeros(MICRO_BATCHES, WORKLOAD)
    workload["micro_batch"], workload["tokens"], workload["squares"] = indices, 100 + indices, 1000 + indices
    spans = np.array([(SpanKind.OPTIMIZER, start + 1.0, start + 1.25), (SpanKind.SAVE, start + 2, start + 9)], SPAN)
    return IterationRecord(epoch, iteration, worker, 0, start, start + 2, ops, transfers, workload, spans)


def assemble(layout: Layout, records: Iterable[IterationRecord]) -> tuple[list[IterationObservations], Assembler]:
    assembler = Assembler()
    assembler.begin(layout)
    found = [each for number, item in enumerate(records) for each in assembler.add(pack(item), 0.001 * number)]
    return found, assembler


def only(layout: Layout, records: Iterable[IterationRecord]) -> IterationObservations:
    found, _ = assemble(layout, records)
    assert len(found) == 1
    return found[0]


def test_ops_stand_where_worker_kind_and_micro_batch_say() -> None:
    layout = two_pipelines()
    seen = only(layout, [record(layout, worker, 7) for worker in (2, 0, 3, 1)])
    assert (seen.epoch, seen.iteration) == (0, 7)
    assert seen.reported.all()
    assert seen.compute.shape == (4, 3, 1, MICRO_BATCHES)
    factor = 1 + layout.workers / 10
    assert seen.compute[:, OpKind.F, 0] == pytest.approx(np.tile(FORWARD * factor[:, None], MICRO_BATCHES))
    assert seen.compute[:, OpKind.B, 0] == pytest.approx(np.tile(BACKWARD * factor[:, None], MICRO_BATCHES))
    assert np.isnan(seen.compute[:, OpKind.W]).all() and np.isnan(seen.waited).all()
    assert seen.tokens[0].tolist() == [100, 102, 104, 106]
    assert seen.squares[3].tolist() == [1001, 1003, 1005, 1007]
    assert seen.seconds == pytest.approx(2.0)
    assert seen.spans[:, SpanKind.OPTIMIZER] == pytest.approx(0.25)
    assert seen.spans[:, SpanKind.SAVE] == pytest.approx(7.0)
    assert (seen.spans[:, SpanKind.EVALUATION] == 0).all()


def test_replicas_that_share_experts_have_the_work_of_the_one_with_most() -> None:
    """They wait for each other in every layer."""
    layout = two_pipelines()
    records = [record(layout, worker, 7) for worker in range(4)]
    records[1].workload["squares"][1] = 9000
    shared = replace(layout, replica=np.zeros(4, dtype=np.int64), tp_rank=layout.replica)
    assert only(shared, records).squares[[1, 3]].tolist() == [[1001, 9000, 1005, 1007]] * 2, "those of its stage"
    assert only(layout, records).squares[3].tolist() == [1001, 1003, 1005, 1007]


def test_waits_in_collectives_are_kept() -> None:
    layout = two_pipelines()
    records = [record(layout, worker, 1) for worker in range(4)]
    records[0].ops["waited"][0] = 0.004
    records[1].ops["waited"][:2] = -1.0, 99.0  # impossible
    seen = only(layout, records)
    assert seen.waited[0, OpKind.F, 0, 0] == pytest.approx(0.004)
    assert np.isnan(seen.waited[1]).all()


def test_a_transfer_does_not_count_the_wait_for_the_other_side() -> None:
    layout = two_pipelines()
    records = [record(layout, worker, 1, transfer_s=TRANSFER_S * (3 if worker > 1 else 1)) for worker in range(4)]
    seen = only(layout, records)
    assert seen.transfer.shape == (2, 2 * MICRO_BATCHES)
    assert seen.transfer[0] == pytest.approx(TRANSFER_S)
    assert seen.transfer[1] == pytest.approx(3 * TRANSFER_S)
    assert (seen.transfer_bytes == SIZE).all()


@given(st.floats(-1e4, 1e4), st.booleans())
def test_clocks_of_machines_may_differ(offset: float, far_is_first: bool) -> None:
    layout = two_pipelines({0: 1, 1: 0, 2: 1, 3: 0} if far_is_first else {0: 0, 1: 1, 2: 0, 3: 1})
    records = [
        record(layout, worker, 1, offset * (layout.stage[worker] == 1), TRANSFER_S * (3 if worker > 1 else 1))
        for worker in range(4)
    ]
    found, assembler = assemble(layout, records)
    assert found[0].transfer[0] == pytest.approx(TRANSFER_S, abs=1e-6)
    assert found[0].transfer[1] == pytest.approx(3 * TRANSFER_S, abs=1e-6)
    assert not assembler.counters.nonzero()


def test_each_machine_may_have_a_clock_of_its_own() -> None:
    layout = two_pipelines({0: 0, 1: 1, 2: 2, 3: 0})
    clocks = np.array([5.0, -300.0, 2e3])[layout.node]
    records = [record(layout, worker, 1, clocks[worker], TRANSFER_S * (1 + worker // 2)) for worker in range(4)]
    found, assembler = assemble(layout, records)
    assert found[0].transfer[0] == pytest.approx(TRANSFER_S, abs=1e-6)
    assert found[0].transfer[1] == pytest.approx(2 * TRANSFER_S, abs=1e-6)
    assert not assembler.counters.nonzero()


def test_the_clock_of_one_machine_is_not_corrected() -> None:
    layout = two_pipelines()
    records = [record(layout, worker, 1) for worker in range(4)]
    for each in records:  # a link that is slow in one direction only looks like an offset between clocks
        each.transfers["done"][each.transfers["kind"] == OpKind.F] += 0.003
    transfer = only(layout, records).transfer[0]
    assert np.sort(transfer) == pytest.approx([TRANSFER_S] * MICRO_BATCHES + [TRANSFER_S + 0.003] * MICRO_BATCHES)


def test_without_both_directions_clocks_cannot_be_compared() -> None:
    layout = two_pipelines({0: 0, 1: 1, 2: 0, 3: 1})
    records = [record(layout, worker, 1) for worker in range(4)]
    records = [replace(each, transfers=each.transfers[:MICRO_BATCHES]) for each in records]
    found, assembler = assemble(layout, records)
    assert np.isnan(found[0].transfer).all()
    assert assembler.counters.nonzero() == {"unsynchronised": 2 * MICRO_BATCHES}


def test_workers_without_features_get_those_of_their_replica() -> None:
    layout = two_pipelines()
    records = [record(layout, worker, 1) for worker in range(4)]
    records[1] = replace(records[1], workload=records[1].workload[:0])
    seen = only(layout, records)
    assert seen.tokens[1].tolist() == seen.tokens[0].tolist() == [100, 102, 104, 106]


def test_a_missing_worker_is_waited_for_and_then_done_without() -> None:
    layout = two_pipelines()
    assembler = Assembler(patience_s=5.0)
    assembler.begin(layout)
    for worker in (0, 1, 2):
        assert not assembler.add(pack(record(layout, worker, 1)), now=10.0)
    assert not assembler.poll(14.9)
    (seen,) = assembler.poll(15.0)
    assert seen.reported.tolist() == [True, True, True, False]
    assert np.isnan(seen.seconds[3]) and np.isnan(seen.compute[3]).all() and np.isnan(seen.spans[3]).all()
    assert assembler.counters.missing == 1
    assert not assembler.add(pack(record(layout, 3, 1)), now=15.1)
    assert assembler.counters.late == 1


def test_who_sent_a_later_record_is_not_waited_for() -> None:
    layout = two_pipelines()
    sent = [record(layout, worker, 1) for worker in (0, 1, 2)] + [record(layout, worker, 2) for worker in (3, 0, 1, 2)]
    found, assembler = assemble(layout, sent)
    assert [each.iteration for each in found] == [1, 2]
    assert found[0].reported.tolist() == [True, True, True, False]
    assert found[1].reported.all()
    assert assembler.counters.missing == 1


@given(st.permutations(range(12)))
def test_iterations_come_out_once_and_in_order(order: list[int]) -> None:
    layout = two_pipelines()
    found, assembler = assemble(layout, [record(layout, number % 4, 1 + number // 4) for number in order])
    found += assembler.poll(1000.0)
    iterations = [each.iteration for each in found]
    assert iterations == sorted(set(iterations))
    counters = assembler.counters
    judged = sum(int(each.reported.sum()) for each in found)
    assert judged + counters.late <= counters.received == 12


def test_duplicates_strangers_and_other_epochs_are_counted() -> None:
    layout = two_pipelines()
    sent = [record(layout, 0, 1), record(layout, 0, 1), record(layout, 1, 1, epoch=5), record(layout, 1, 1)]
    sent += [replace(record(layout, 1, 1), worker=99), replace(record(layout, 2, 1), lost=3), record(layout, 3, 1)]
    found, assembler = assemble(layout, sent)
    assert len(found) == 1 and found[0].reported.all()
    assert assembler.counters.nonzero() == {"duplicate": 1, "other_epoch": 1, "unknown_worker": 1, "lost": 3}


def test_a_new_epoch_starts_afresh() -> None:
    layout = two_pipelines()
    assembler = Assembler()
    assembler.begin(layout)
    assembler.add(pack(record(layout, 0, 9)), 0.0)
    assembler.begin(replace(layout, epoch=1))
    sent = [record(layout, worker, 5, epoch=1) for worker in range(4)]
    found = [each for item in sent for each in assembler.add(pack(item), 0.0)]
    assert [each.iteration for each in found] == [5]


def test_before_the_first_epoch_nothing_is_judged() -> None:
    assembler = Assembler()
    assert not assembler.add(pack(record(two_pipelines(), 0, 1)), 0.0)
    assert assembler.counters.other_epoch == 1


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_garbage_is_counted_and_does_no_harm(garbage: list[bytes]) -> None:
    layout = two_pipelines()
    assembler = Assembler()
    assembler.begin(layout)
    for message in garbage:
        assert not assembler.add(message, 0.0)
    found = [each for worker in range(4) for each in assembler.add(pack(record(layout, worker, 1)), 0.0)]
    assert len(found) == 1
    counts = assembler.counters.nonzero()
    assert sum(counts.values()) == len(garbage)


def test_one_absurd_number_does_not_carry_the_job_into_the_future() -> None:
    layout = two_pipelines()
    sent = [record(layout, 0, 1_000_000)]
    sent += [record(layout, worker, iteration) for iteration in (1, 2, 3) for worker in (3, 2, 1, 0)]
    assembler = Assembler(patience_s=1.0)
    assembler.begin(layout)
    found = [each for number, item in enumerate(sent) for each in assembler.add(pack(item), 0.3 * number)]
    found += assembler.poll(100.0)
    assert [each.iteration for each in found] == [1, 2, 3]
    assert found[-1].reported.all()
    assert assembler.counters.abandoned == 1


NAN = float("nan")


@pytest.mark.parametrize(("start", "end"), [(NAN, 1.0), (1.0, NAN), (5.0, 4.0), (0.0, 1e9), (NAN, NAN)])
def test_impossible_times_are_counted_and_left_out(start: float, end: float) -> None:
    layout = two_pipelines()
    records = [record(layout, worker, 1) for worker in range(4)]
    records[2].ops["start"][1], records[2].ops["end"][1] = start, end
    found, assembler = assemble(layout, records)
    assert np.isnan(found[0].compute[2, OpKind.F, 0, 1])
    assert np.isfinite(found[0].compute[:, :2]).sum() == 4 * 2 * MICRO_BATCHES - 1
    assert assembler.counters.nonzero() == {"bad_times": 1}


def test_unknown_kinds_are_counted_and_left_out() -> None:
    layout = two_pipelines()
    records = [record(layout, worker, 1) for worker in range(4)]
    records[0].ops["kind"][0] = 77
    records[1].spans["kind"][0] = 77
    found, assembler = assemble(layout, records)
    assert assembler.counters.nonzero() == {"bad_times": 2}
    assert found[0].spans[1, SpanKind.OPTIMIZER] == 0


def test_a_clock_that_jumps_spoils_only_its_own_transfers() -> None:
    layout = two_pipelines()
    records = [record(layout, worker, 1) for worker in range(4)]
    records[1].transfers["posted"] -= 3600
    records[1].transfers["done"] -= 3600
    found, assembler = assemble(layout, records)
    forward = np.arange(2 * MICRO_BATCHES) < MICRO_BATCHES
    assert np.isnan(found[0].transfer[0, forward]).all()
    assert found[0].transfer[1] == pytest.approx(TRANSFER_S)
    assert assembler.counters.nonzero() == {"bad_transfers": MICRO_BATCHES}


def test_a_side_without_the_other_is_counted() -> None:
    layout = two_pipelines()
    records = [record(layout, worker, 1) for worker in range(4)]
    records[0] = replace(records[0], transfers=records[0].transfers[1:])
    records[2].transfers["peer"][0] = 55
    found, assembler = assemble(layout, records)
    assert found[0].transfer.shape == (2, 2 * MICRO_BATCHES - 1)
    assert found[0].transfer == pytest.approx(TRANSFER_S)
    assert assembler.counters.nonzero() == {"unpaired": 3}


def test_with_chunks_the_nth_sent_is_the_nth_received() -> None:
    """From the last stage back to the first a transfer changes its chunk."""
    layout = layout_of(ParallelPlan((Replica(((0,), (1,)), (0,)),)), 0, {0: 0, 1: 0}, interleaved=True)

    def sides(entries: list[tuple[int, int, int, float, float]]) -> np.ndarray:
        rows = [(peer, got, OpKind.F, chunk, 0, *times, SIZE) for peer, got, chunk, *times in entries]
        return np.array(rows, TRANSFER)

    empty = np.zeros(0, OP), np.zeros(0, WORKLOAD), np.zeros(0, SPAN)
    first = sides([(1, 0, 0, 0.10, 0.11), (1, 1, 1, 0.05, 0.30), (1, 0, 1, 0.40, 0.41)])
    second = sides([(0, 1, 0, 0.00, 0.12), (0, 0, 0, 0.27, 0.28), (0, 1, 1, 0.30, 0.44)])
    records = [
        IterationRecord(0, 1, worker, 0, 0.0, 1.0, empty[0], transfers, *empty[1:])
        for worker, transfers in enumerate((first, second))
    ]
    seen = only(layout, records)
    assert sorted(seen.transfer[0]) == pytest.approx([0.02, 0.03, 0.04])


def test_while_its_process_was_stopped_a_worker_did_not_wait_for_data() -> None:
    layout = two_pipelines()
    records = [record(layout, worker, 7) for worker in range(4)]
    start = records[1].start
    spans = [(SpanKind.DATA, 0.1, 0.2), (SpanKind.DATA, 0.5, 0.6), (SpanKind.ABSENT, 0.15, 0.18),
             (SpanKind.ABSENT, 0.19, 0.4), (SpanKind.ABSENT, 0.45, 0.7)]  # fmt: skip
    rows = np.array([(kind, start + began, start + ended) for kind, began, ended in spans], SPAN)
    records[1] = replace(records[1], spans=rows)
    records[2] = replace(records[2], spans=rows[:2])
    seen = only(layout, records)
    at = {worker: row for row, worker in enumerate(layout.workers.tolist())}
    data = seen.spans[:, SpanKind.DATA]
    assert data[at[1]] == pytest.approx(0.06) and data[at[2]] == pytest.approx(0.2)
    assert seen.spans[at[1], SpanKind.ABSENT] == pytest.approx(0.49) and not seen.spans[at[2], SpanKind.ABSENT]


@pytest.mark.parametrize(("mate_waited", "left"), [(0.09, 0.03), (0.02, 0.08), (np.nan, 0.1)])
def test_while_its_process_was_stopped_a_worker_waited_for_nobody_who_waited_for_it(
    mate_waited: float, left: float
) -> None:
    """Where its mate came later still, it would have had to wait for that one anyway."""
    layout = layout_of(ParallelPlan((Replica(((0, 1),), (0,)),)), 0, {0: 0, 1: 0})
    records = []
    for worker, waited in ((0, 0.1), (1, mate_waited)):
        ops = np.array([(OpKind.F, 0, 0, 10.0, 10.2, waited)], OP)
        stops = [(SpanKind.ABSENT, 10.05, 10.1), (SpanKind.ABSENT, 10.18, 10.5)] if worker == 0 else []
        nothing = np.zeros(0, TRANSFER), np.zeros(0, WORKLOAD)
        records.append(IterationRecord(0, 1, worker, 0, 10.0, 11.0, ops, *nothing, np.array(stops, SPAN)))
    seen = only(layout, records)
    assert seen.waited[0, OpKind.F, 0, 0] == pytest.approx(left)
    assert seen.waited[1, OpKind.F, 0, 0] == pytest.approx(mate_waited, nan_ok=True)
