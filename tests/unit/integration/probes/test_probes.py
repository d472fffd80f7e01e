# SPDX-License-Identifier: Apache-2.0
"""What the probes note: ops with their waiting, whose transfers, and that a record holds one iteration and no other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_resihp.detector.input.records import IterationRecord, OpKind, SpanKind
from megatron_resihp.integration.probes.op_notes import SAMPLE
from megatron_resihp.integration.probes.pauses import MOST_PAUSES
from megatron_resihp.integration.probes.probe_clock import HostClock
from megatron_resihp.integration.probes.probes import Probes

GROUP = object()
WORKERS = (10, 11, 12, 13)


class FakeClock:
    """A device's clock that a test moves; a mark is the index of a time, readable only once it has passed."""

    immediate = False

    def __init__(self) -> None:
        self.times: list[float] = []
        self.now = 0.0
        self.anchored = False

    def mark(self) -> float:
        self.now += 1.0
        self.times.append(self.now)
        return float(len(self.times) - 1)

    def anchor(self) -> None:
        self.anchored = True

    def resolve(self, marks: Any) -> Any:
        assert self.anchored, "the device was not waited for"
        return np.array([self.times[int(mark)] if mark == mark else math.nan for mark in marks])

    def reset(self) -> None:
        self.times.clear()


def make(
    make_clock: Any = HostClock, run_delay: Callable[[], float] = lambda: 0.0
) -> tuple[Probes, list[IterationRecord]]:
    sent: list[IterationRecord] = []
    probes = Probes(3, make_clock, lambda sheet: sent.append(sheet.record()), run_delay)
    probes.ops.tp_group, probes.ops.stage_groups = GROUP, (GROUP,)
    return probes, sent


def run_micro_batch(probes: Probes, index: int, pad: Any = None) -> None:
    """Forward with one collective, then backward, of a stage in the middle."""
    received, output, gradient, to_send = [torch.empty(4) for _ in range(4)]
    came = probes.transfers.post(received, 0, OpKind.F, True, probes.mark())
    probes.transfers.done([came], None)
    probes.ops.open_forward(0, index, [received])
    assert probes.ops.timed_groups == (GROUP,) or not probes.immediate
    if probes.ops.timed_groups:
        probes.ops.note_wait(probes.mark())
    outputs = [output]
    probes.ops.close_forward(outputs, outputs, (32.0, 1024.0), pad)
    probes.transfers.done([probes.transfers.post(output, 2, OpKind.F, False, probes.mark())], None)
    probes.transfers.done([probes.transfers.post(gradient, 2, OpKind.B, True, probes.mark())], None)
    probes.ops.open_backward(outputs, [gradient])
    probes.ops.close_backward([to_send], pad)
    probes.transfers.done([probes.transfers.post(to_send, 0, OpKind.B, False, probes.mark())], None)


def test_a_record_names_micro_batches_by_their_index_in_the_global_batch() -> None:
    probes, sent = make()
    probes.begin(2, 7, (1, 3, 5), WORKERS)
    for index in range(3):
        run_micro_batch(probes, index)
    probes.finish()
    (record,) = sent
    assert (record.epoch, record.iteration, record.worker) == (2, 7, 3)
    assert record.ops["micro_batch"].tolist() == [1, 1, 3, 3, 5, 5]
    assert record.ops["kind"].tolist() == [OpKind.F, OpKind.B] * 3
    assert (record.ops["end"] >= record.ops["start"]).all() and (record.ops["waited"] >= 0).all()
    assert record.workload["micro_batch"].tolist() == [1, 3, 5]
    assert record.workload["squares"].tolist() == [1024.0] * 3


def test_transfers_belong_to_the_op_that_makes_or_takes_the_tensor() -> None:
    probes, sent = make()
    probes.begin(0, 1, (1, 3), WORKERS)
    for index in range(2):
        run_micro_batch(probes, index)
    probes.finish()
    transfers = sent[0].transfers
    assert transfers["micro_batch"].tolist() == [1, 1, 1, 1, 3, 3, 3, 3]
    assert transfers["kind"].tolist() == [OpKind.F, OpKind.F, OpKind.B, OpKind.B] * 2
    assert transfers["received"].tolist() == [1, 0, 1, 0] * 2
    assert transfers["peer"].tolist() == [10, 12, 12, 10] * 2
    assert (transfers["bytes"] == 16).all() and (transfers["done"] >= transfers["posted"]).all()


def test_waiting_is_told_apart() -> None:
    probes, sent = make()
    probes.begin(0, 1, (0,), WORKERS)
    probes.ops.open_forward(0, 0, [])
    probes.ops.note_wait(probes.mark() - 0.5)
    probes.ops.note_wait(probes.mark() - 0.25)
    probes.ops.close_forward(object(), [], None, None)
    assert not probes.ops.timed_groups, "outside of ops nothing is waited for"
    probes.finish()
    assert sent[0].ops["waited"][0] == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize("iteration", range(1, 1 + SAMPLE))
def test_what_parameters_are_waited_for_is_no_work(iteration: int) -> None:
    """On a device, where not all ops are timed, this one is."""
    clock = FakeClock()
    probes, sent = make(lambda: clock)
    probes.begin(0, iteration, (0,), WORKERS)
    probes.ops.open_forward(0, 0, [])
    since = probes.mark()
    clock.now += 40.0
    probes.ops.note_parameters(since)
    probes.ops.close_forward(object(), [], (32.0, 1024.0), None)
    probes.synchronized()
    probes.finish()
    probes.synchronized()
    probes.flush()
    [op] = sent[0].ops
    assert op["waited"] == 41.0 and op["end"] - op["start"] == 43.0


def test_on_the_emulated_clock_only_members_who_begin_late_are_waited_for() -> None:
    probes, sent = make()
    probes.ops.emulated = True
    probes.begin(0, 1, (0, 1), WORKERS)
    for index in range(2):
        probes.ops.open_forward(0, index, [])
        probes.ops.note_wait(probes.mark() - 0.5)
        probes.ops.note_wait(probes.mark() - 0.25)
        probes.ops.close_forward(object(), [], None, None)
    probes.finish()
    assert sent[0].ops["waited"] == pytest.approx([0.5, 0.5], abs=0.05)


def test_on_the_emulated_clock_what_the_host_holds_up_is_no_work_of_the_device() -> None:
    probes, sent = make()
    probes.ops.emulated = True
    probes.begin(0, 1, (0,), WORKERS)
    probes.ops.open_forward(0, 0, [])
    probes.ops.note_wait(probes.mark() - 0.5)
    probes.ops.note_wait(probes.mark() - 0.25)
    probes.ops.close_forward(object(), [], None, lambda *_: 9.0)
    probes.finish()
    assert sent[0].ops["waited"] == pytest.approx([9.5], abs=0.05)


def test_on_the_emulated_clock_a_transfer_lasts_as_long_as_on_the_device() -> None:
    probes, sent = make()
    probes.begin(0, 1, (0,), WORKERS)
    tensor = torch.empty(4)

    def pad(peer: int, came: float, size: float) -> float:
        assert (peer, size) == (10, 16.0)
        while probes.mark() < came + 0.5:
            pass
        return 0.2

    for received in (True, False):
        probes.transfers.done([probes.transfers.post(tensor, 0, OpKind.F, received, probes.mark() - 5.0)], pad)
    probes.finish()
    lasted = sent[0].transfers["done"] - sent[0].transfers["posted"]
    assert lasted == pytest.approx([0.3, 5.0], abs=0.05), "only what is received is padded"


def test_an_op_begins_when_its_micro_batch_is_there() -> None:
    probes, sent = make()
    probes.begin(0, 1, (0,), WORKERS)
    probes.ops.open_forward(0, 0, [])
    probes.ops.note_wait(probes.mark() - 9.0)
    probes.ops.batch_came()
    probes.ops.close_forward(object(), [], None, None)
    probes.finish()
    op, span = sent[0].ops[0], sent[0].spans[0]
    assert op["waited"] == 0
    assert span["kind"] == SpanKind.DATA and span["end"] <= op["start"]


@pytest.mark.parametrize(("delayed", "told"), [(0.0, 0.02), (0.015, 0.005), (9.0, 0.0)])
def test_time_in_which_there_was_no_core_for_it_is_no_wait_for_data(delayed: float, told: float) -> None:
    delays = iter((3.0, 3.0 + delayed))
    probes, sent = make(run_delay=lambda: next(delays))
    probes.begin(0, 1, (0,), WORKERS)
    probes.ops.open_forward(0, 0, [])
    probes.ops._entered -= 0.02
    probes.ops.batch_came()
    probes.ops.close_forward(object(), [], None, None)
    probes.finish()
    [span] = sent[0].spans
    assert span["end"] - span["start"] == pytest.approx(told, abs=0.004)


def test_an_op_is_padded_before_it_ends() -> None:
    probes, sent = make()
    padded: list[tuple[Any, ...]] = []

    def pad(*values: Any) -> float:
        padded.append((*values, probes.mark()))
        return 0.0

    probes.begin(0, 1, (0,), WORKERS)
    run_micro_batch(probes, 0, pad)
    probes.finish()
    assert [values[:4] for values in padded] == [(OpKind.F, 0, 32.0, 1024.0), (OpKind.B, 0, 32.0, 1024.0)]
    for op, values in zip(sent[0].ops, padded, strict=True):
        assert op["start"] == values[4] and values[6] <= op["end"]


def test_a_weight_gradient_is_an_op_of_its_own() -> None:
    probes, sent = make()
    padded: list[tuple[Any, ...]] = []

    def pad(*values: Any) -> float:
        padded.append(values)
        return 0.0

    probes.begin(0, 1, (0,), WORKERS)
    run_micro_batch(probes, 0)
    with probes.ops.weight_gradient(0, 0, pad):
        pass
    probes.finish()
    assert sent[0].ops["kind"].tolist() == [OpKind.F, OpKind.B, OpKind.W]
    assert [values[:4] for values in padded] == [(OpKind.W, 0, 32.0, 1024.0)]


def test_a_broken_iteration_leaves_nothing_in_the_next_record() -> None:
    probes, sent = make()
    probes.begin(0, 4, (0, 1), WORKERS)
    run_micro_batch(probes, 0)
    probes.ops.open_forward(0, 1, [])
    probes.abandon()
    assert probes.ops.tp_group is None and not probes.ops.stage_groups, "the broken epoch's groups must be free to go"
    probes.ops.tp_group, probes.ops.stage_groups = GROUP, (GROUP,)
    probes.begin(1, 4, (0, 1), WORKERS)
    run_micro_batch(probes, 1)
    probes.finish()
    (record,) = sent
    assert record.epoch == 1 and record.ops["micro_batch"].tolist() == [1, 1]
    assert len(record.transfers) == 4


def test_a_record_that_cannot_be_made_ends_the_measuring_and_not_the_training(capsys: Any) -> None:
    clocks = [FakeClock(), FakeClock()]
    waiting = iter(clocks)
    probes, sent = make(lambda: next(waiting))
    probes.begin(0, 1, (0,), WORKERS)
    run_micro_batch(probes, 0)
    probes.finish()
    probes.flush()  # the device was not waited for, so the marks cannot be read
    assert "measures no more" in capsys.readouterr().err
    probes.begin(0, 2, (0,), WORKERS)
    assert not probes.recording and not sent


def test_collections_of_a_standby_do_not_pile_up() -> None:
    probes, _ = make()
    for _ in range(3 * MOST_PAUSES):
        probes.pauses.on_collection("start", {})
        probes.pauses.on_collection("stop", {})
    assert len(probes.pauses._noted) == MOST_PAUSES


def test_spans_between_iterations_go_to_the_next_record() -> None:
    probes, sent = make()
    for iteration in (1, 2):
        probes.begin(0, iteration, (0,), WORKERS)
        probes.finish()
        with probes.span(SpanKind.SAVE):
            pass
    assert [record.spans["kind"].tolist() for record in sent] == [[], [SpanKind.SAVE]]


def test_marks_of_a_device_are_read_only_after_the_host_has_waited_for_it() -> None:
    probes, sent = make(FakeClock)
    for iteration in (1, 2):
        probes.begin(0, iteration, (0, 1), WORKERS)
        for index in range(2):
            run_micro_batch(probes, index)
        probes.synchronized()
        probes.flush()
        assert len(sent) == iteration - 1
        probes.finish()
    (record,) = sent
    assert record.iteration == 1
    assert (record.ops["end"] > record.ops["start"]).all() and np.isfinite(record.transfers["done"]).all()


def test_on_a_device_waiting_is_timed_on_a_sample_of_micro_batches() -> None:
    probes, sent = make(FakeClock)
    micro_batches = tuple(range(0, 4 * SAMPLE, 2))  # every second one, as with two replicas
    for iteration in range(1, SAMPLE + 2):
        probes.begin(0, iteration, micro_batches, WORKERS)
        for index in range(len(micro_batches)):
            run_micro_batch(probes, index)
        probes.synchronized()
        probes.flush()
        probes.finish()
    timed = [set(r.ops["micro_batch"][(r.ops["kind"] == OpKind.F) & (r.ops["waited"] > 0)].tolist()) for r in sent]
    assert all(len(found) == 2 for found in timed)
    assert set().union(*timed) == set(micro_batches), "every micro-batch has its turn"
    assert all(np.isnan(r.ops["waited"]).sum() == 2 * (len(micro_batches) - 2) for r in sent)


def test_many_ops_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    probes, sent = make()
    probes.begin(0, 1, tuple(range(500)), WORKERS)
    for index in range(500):
        run_micro_batch(probes, index)
    probes.finish()
    assert len(sent[0].ops) == 1000 and sent[0].ops["micro_batch"].tolist() == [i for i in range(500) for _ in "FB"]


def test_the_chunk_that_was_run_last_is_none_of_the_next_iterations() -> None:
    """Megatron's own schedule doesn't say which chunk it runs where there is only one."""
    probes = Probes(0, HostClock, lambda sheet: None)
    probes.ops.running_chunk = 1
    probes.begin(1, 3, (0, 1), (0,))
    assert probes.ops.running_chunk == 0


def test_garbage_collections_are_noted() -> None:
    import gc

    probes, sent = make()
    probes.pauses.watch()
    try:
        probes.begin(0, 1, (0,), WORKERS)
        gc.collect()
        probes.finish()
    finally:
        gc.callbacks.remove(probes.pauses.on_collection)
    assert SpanKind.GARBAGE_COLLECTION in sent[0].spans["kind"].tolist()
