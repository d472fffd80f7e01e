# SPDX-License-Identifier: Apache-2.0
"""Transfers under a heterogeneous plan as the probes note them, and when they come on the emulated clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_resihp.detector.input.records import OpKind
from megatron_resihp.executor.carriers import HostCarrier
from megatron_resihp.executor.messages import Message
from megatron_resihp.executor.routes import Step
from megatron_resihp.integration.ops import measured_exchange
from megatron_resihp.integration.ops.measured_exchange import MeasuredExchange
from megatron_resihp.plan import PlannedOp

TOKENS, SHAPE = 4, (1, 8)
LINK_S = {(0, 2): 0.05, (1, 2): 0.02}


class Wire:
    """Stands for gloo: what was sent, by both ranks and tag."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int, int], torch.Tensor] = {}
        self.reading: Callable[[], None] = lambda: None

    def isend(self, tensor: torch.Tensor, group: int, group_dst: int, tag: int = 0) -> Any:
        self.sent[group, group_dst, tag] = tensor.clone()
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, tensor: torch.Tensor, group: int, group_src: int, tag: int = 0) -> Any:
        def wait() -> None:
            self.reading()
            tensor.copy_(self.sent.pop((group_src, group, tag)))

        return SimpleNamespace(wait=wait)


class Worker:
    """An exchange, and what its probes and its padding were told."""

    def __init__(self, me: int, own_chunks: Sequence[int], emulated: bool, recording: bool = True) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.arrivals: list[float] = []
        self.reached = 0
        probes: Any = SimpleNamespace(
            recording=recording, immediate=True, transfers=SimpleNamespace(note=lambda *row: self.rows.append(row))
        )
        padding: Any = SimpleNamespace(
            transfer_seconds=lambda peer, size: LINK_S[min(peer, me), max(peer, me)], pad_arrival=self.arrivals.append
        )
        ranks = {worker: worker for worker in range(3)}
        group: Any = me
        carrier = HostCarrier(me, group, ranks, None, torch.device("cpu"))
        self.exchange = MeasuredExchange(me, carrier, SHAPE, torch.float32)
        self.exchange.begin(probes, padding if emulated else None, own_chunks, self._reach, (group, ranks))

    def _reach(self) -> None:
        self.reached += 1


@pytest.fixture(autouse=True)
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(dist, "isend", wire.isend)
    monkeypatch.setattr(dist, "irecv", wire.irecv)
    return wire


def forwards(emulated: bool, recording: bool = True) -> tuple[Worker, Worker, Worker, float]:
    """Micro-batch 5 from workers 0 and 1, chunk 1 of theirs, to worker 2, the only one of chunk 2."""
    workers = [Worker(me, own, emulated, recording) for me, own in ((0, (0, 1)), (1, (0, 1)), (2, (2,)))]
    message = Message(PlannedOp("F", 1, 5), (0, 1), (2,), TOKENS, False, 7)
    workers[2].exchange.take(message)
    tensor = torch.arange(TOKENS * 8, dtype=torch.float32).view(TOKENS, *SHAPE)
    for worker in workers[:2]:
        worker.exchange.send(message, tensor)
    sent_at = time.monotonic()
    assert torch.equal(workers[2].exchange.receive(message), tensor)
    for worker in workers[:2]:
        worker.exchange.settle(message)
    return workers[0], workers[1], workers[2], sent_at


def test_both_ends_note_a_transfer_by_their_own_chunks() -> None:
    first, second, receiver, _ = forwards(emulated=False)
    size = TOKENS // 2 * 8 * 4
    for sender in (first, second):
        ((peer, received, kind, chunk, micro_batch, _, _, bytes_),) = sender.rows
        assert (peer, received, kind, chunk, micro_batch, bytes_) == (2, False, OpKind.F, 1, 5, size)
    assert [row[:5] for row in receiver.rows] == [(0, True, OpKind.F, 0, 5), (1, True, OpKind.F, 0, 5)]
    assert [row[7] for row in receiver.rows] == [size, size]


def test_a_fault_injection_may_strike_at_each_transfer() -> None:
    *workers, _ = forwards(emulated=False)
    assert [worker.reached for worker in workers] == [1, 1, 1]


def test_on_the_emulated_clock_a_message_comes_as_long_after_it_was_sent_as_its_slowest_piece_takes(wire: Wire) -> None:
    _, _, receiver, sent_at = forwards(emulated=True)
    (arrival,) = receiver.arrivals
    assert arrival == pytest.approx(sent_at + 0.05, abs=0.01)
    took = [done - posted for *_, posted, done, _ in receiver.rows]
    assert took[0] - took[1] == pytest.approx(0.03, abs=0.01)
    assert not wire.sent, "no moment is left behind for the next message of the same tag"


def test_outside_of_an_iteration_nothing_is_noted_or_padded(wire: Wire) -> None:
    *workers, _ = forwards(emulated=True, recording=False)
    assert not any(worker.rows or worker.arrivals for worker in workers) and not wire.sent


def test_what_came_while_its_receiver_computed_has_no_time_however_long_reading_it_takes(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(measured_exchange, "time", SimpleNamespace(monotonic=lambda: clock.now))
    wire.reading = lambda: setattr(clock, "now", clock.now + 0.002)
    sender, receiver = Worker(0, (0,), emulated=True), Worker(2, (1,), emulated=True)
    messages = [Message(PlannedOp("F", 0, number), (0,), (2,), TOKENS, False, number) for number in range(2)]
    for message in messages:
        receiver.exchange.take(message)
        sender.exchange.send(message, torch.zeros(TOKENS, *SHAPE))
    receiver.exchange.receive(messages[0])
    clock.now += 1.0
    receiver.exchange.receive(messages[1])
    waited_for, found = (done - posted for *_, posted, done, _ in receiver.rows)
    assert waited_for == pytest.approx(0.05)
    assert math.isnan(found)


def test_an_evaluation_may_carry_other_micro_batches(wire: Wire) -> None:
    sender, receiver = (Worker(me, (me,), emulated=False).exchange for me in (0, 1))
    message = Message(PlannedOp("F", 0, 0), (0,), (1,), TOKENS, False, 0)
    larger = torch.rand(TOKENS, 3, 8)
    with sender.carrying((3, 8)), receiver.carrying((3, 8)):
        receiver.take(message)
        sender.send(message, larger)
        assert torch.equal(receiver.receive(message), larger)
    with pytest.raises(ValueError, match=r"\(4, 3, 8\) of .*; \(4, 1, 8\)"):
        sender.send(message, larger)


def test_who_has_met_is_not_waited_for_again(wire: Wire) -> None:
    exchange = Worker(0, (0,), emulated=False).exchange
    steps = [
        Step(op, None, Message(op, (0,), (receiver,), TOKENS, False, receiver))
        for receiver, op in ((1, PlannedOp("F", 0, 0)), (2, PlannedOp("F", 0, 1)))
    ]
    exchange.connect(steps[:1])
    assert wire.sent.keys() == {(0, 1, 0)}
    wire.sent.clear()
    exchange.connect(steps)
    assert wire.sent.keys() == {(0, 2, 0)}
