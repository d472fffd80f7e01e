# SPDX-License-Identifier: Apache-2.0
"""What is computed when, what crosses, what is kept and for how long."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_resihp.coding import decode
from megatron_resihp.executor.carriers import HostCarrier
from megatron_resihp.executor.exchange import PieceExchange
from megatron_resihp.executor.interpreter import run
from megatron_resihp.executor.messages import Message
from megatron_resihp.executor.routes import Step, routes_for
from megatron_resihp.plan import Chunk, ParallelPlan, PlannedOp, Replica, Schedule

TOKENS = 4


def steps_of(worker: int, *orders: str, homes: Sequence[int]) -> tuple[Step, ...]:
    """The steps of one of as many workers as orders, with a micro-batch or two."""
    schedule = decode(Schedule, {"name": "explicit", "orders": list(orders)})
    chunks = tuple(Chunk(home, number, number + 1) for number, home in enumerate(homes))
    micro_batches = tuple(sorted({op.micro_batch for order in schedule.orders for op in order}))
    plan = ParallelPlan((Replica(tuple((w,) for w in range(len(orders))), micro_batches, chunks, schedule),))
    return routes_for(plan, [schedule.orders], worker, False, TOKENS, ahead=0)


class Log:
    """Work and exchange that write down what they are asked for; results are numbered by op."""

    def __init__(self, result: Callable[[], Tensor | None] = lambda: torch.ones(TOKENS, 1)) -> None:
        self.lines: list[str] = []
        self.result = result
        self.received: dict[str, Tensor | None] = {}

    def forward(self, chunk: int, micro_batch: int, received: Tensor | None) -> Tensor | None:
        return self._compute(PlannedOp("F", chunk, micro_batch), received)

    def backward(self, chunk: int, micro_batch: int, received: Tensor | None) -> Tensor | None:
        return self._compute(PlannedOp("B", chunk, micro_batch), received)

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        self._compute(PlannedOp("W", chunk, micro_batch), None)

    def _compute(self, op: PlannedOp, received: Tensor | None) -> Tensor | None:
        self.lines.append(str(op))
        self.received[str(op)] = received
        return self.result()

    def take(self, message: Message) -> None:
        self.lines.append(f"take {message.op}")

    def receive(self, message: Message) -> Tensor:
        self.lines.append(f"receive {message.op}")
        return torch.full((TOKENS, 1), 7.0)

    def send(self, message: Message, tensor: Tensor) -> None:
        self.lines.append(f"send {message.op}")

    def settle(self, message: Message) -> None:
        self.lines.append(f"settle {message.op}")

    def finish(self) -> None:
        self.lines.append("finish")


def test_around_each_op_its_messages() -> None:
    log = Log()
    run(steps_of(0, "F0.0 B0.0 W0.0", "F0.1 B0.1 W0.1", homes=(0, 1)), log, log)
    assert log.lines == [
        "F0.0", "send F0.0", "take B0.1", "receive B0.1", "B0.0", "settle F0.0", "W0.0", "finish",
    ]  # fmt: skip


def test_a_received_input_is_waited_for_before_its_op() -> None:
    log = Log()
    run(steps_of(1, "F0.0 B0.0", "F0.1 B0.1", homes=(0, 1)), log, log)
    assert log.lines == ["take F0.0", "receive F0.0", "F0.1", "B0.1", "send B0.1", "finish"]


def test_ends_of_the_pipeline_receive_nothing() -> None:
    log = Log()
    run(steps_of(0, "F0.0 B0.0", homes=(0,)), log, log)
    assert log.received == {"F0.0": None, "B0.0": None}
    assert log.lines == ["F0.0", "B0.0", "finish"]


def test_the_input_of_a_forward_asks_for_its_gradient() -> None:
    log = Log()
    run(steps_of(1, "F0.0 B0.0", "F0.1 B0.1", homes=(0, 1)), log, log)
    received = log.received["F0.1"]
    assert received is not None and received.requires_grad and received.is_leaf


def test_results_for_the_same_stage_are_kept_and_cut_from_the_graph() -> None:
    weight = torch.ones(TOKENS, 1, requires_grad=True)
    log = Log(lambda: weight * 3)
    run(steps_of(0, "F0.0 F0.1 B0.1 B0.0", homes=(0, 0)), log, log)
    assert log.lines == ["F0.0", "F0.1", "B0.1", "B0.0", "finish"]
    forward, backward = log.received["F0.1"], log.received["B0.0"]
    assert forward is not None and backward is not None
    assert forward.is_leaf and forward.requires_grad and bool((forward == 3).all())
    assert not backward.requires_grad and bool((backward == 3).all())


def test_nothing_outlives_its_use() -> None:
    """Neither what was received or kept, nor results that were sent: the exchange alone decides how long those live."""
    alive: list[Any] = []

    class Watched(Log):
        def _compute(self, op: PlannedOp, received: Tensor | None) -> Tensor | None:
            live = [number for number, reference in enumerate(alive) if reference() is not None]
            assert len(live) <= (received is not None), f"{op} finds {live} alive"
            result = torch.ones(TOKENS, 1)
            alive.append(weakref.ref(result))
            return result

        def receive(self, message: Message) -> Tensor:
            tensor = torch.ones(TOKENS, 1)
            alive.append(weakref.ref(tensor))
            return tensor

    log = Watched()
    run(steps_of(0, "F0.0 F0.2 B0.2 B0.0", "F0.1 B0.1", homes=(0, 1, 0)), log, log)
    assert all(reference() is None for reference in alive)


def test_a_result_that_is_missing() -> None:
    log = Log(lambda: None)
    with pytest.raises(ValueError, match=r"op F0\.0 gave no result"):
        run(steps_of(0, "F0.0 B0.0", "F0.1 B0.1", homes=(0, 1)), log, log)


@pytest.mark.parametrize("tensor", (torch.ones(TOKENS + 1, 2), torch.ones(TOKENS, 2, dtype=torch.float64)))
def test_a_tensor_of_another_shape_or_type_is_not_sent(tensor: Tensor) -> None:
    message = Message(PlannedOp("F", 0, 0), (0,), (1,), TOKENS, False, 0)
    carrier = HostCarrier(0, None, {}, None, torch.device("cpu"))  # type: ignore[arg-type]
    exchange = PieceExchange(0, carrier, (2,), torch.float32)
    with pytest.raises(ValueError, match=r"\(4, 2\) of torch.float32 should be sent"):
        exchange.send(message, tensor)
