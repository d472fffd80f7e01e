# SPDX-License-Identifier: Apache-2.0
"""Runs a worker's steps: `Work` computes, `Exchange` transfers results. May import torch, `plan`, routes."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megatron_resihp.executor.messages import Message
from megatron_resihp.executor.routes import Step
from megatron_resihp.plan import PlannedOp


class Work(Protocol):
    """The computation of a worker's ops. It keeps the state that B and W need from F. All tensors are its own part."""

    def forward(self, chunk: int, micro_batch: int, received: Tensor | None) -> Tensor | None:
        """F.

        Args:
            received: the result of the chunk before, a leaf that asks for its gradient; None for the first chunk.

        Returns:
            the chunk's output, which is sent as it is; not used for the last chunk.
        """
        ...

    def backward(self, chunk: int, micro_batch: int, received: Tensor | None) -> Tensor | None:
        """B, the whole backward if there is no W.

        Args:
            received: the gradient of the chunk's output; None for the last chunk.

        Returns:
            the gradient of the chunk's input; not used for the first chunk.
        """
        ...

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        """W."""
        ...


class Exchange(Protocol):
    """Transfers messages; `exchange.PieceExchange` documents each method."""

    def take(self, message: Message) -> None: ...

    def receive(self, message: Message) -> Tensor: ...

    def send(self, message: Message, tensor: Tensor) -> None: ...

    def settle(self, message: Message) -> None: ...

    def finish(self) -> None: ...


def run(steps: Sequence[Step], work: Work, exchange: Exchange) -> None:
    """Run all steps in their order. Returns when everything that they send has been received.

    Raises:
        ValueError: an op has no result, but another op needs it.
        every error of `work` and `exchange`.
    """
    interpreter = _Interpreter(work, exchange)
    for step in steps:
        interpreter.run(step)
    exchange.finish()


class _Interpreter:
    def __init__(self, work: Work, exchange: Exchange) -> None:
        self._work = work
        self._exchange = exchange
        self._kept: dict[PlannedOp, Tensor] = {}

    def run(self, step: Step) -> None:
        for message in step.receives:
            self._exchange.take(message)
        result = self._compute(step)
        if isinstance(step.target, PlannedOp):
            self._kept[step.target] = _required(result, step).detach()
        elif step.target is not None:
            self._exchange.send(step.target, _required(result, step))
        for message in step.settled:
            self._exchange.settle(message)

    def _compute(self, step: Step) -> Tensor | None:
        kind, chunk, micro_batch = step.op
        if kind == "W":
            self._work.weight_gradient(chunk, micro_batch)
            return None
        received = self._received(step)
        if kind == "B":
            return self._work.backward(chunk, micro_batch, received)
        return self._work.forward(chunk, micro_batch, received if received is None else received.requires_grad_())

    def _received(self, step: Step) -> Tensor | None:
        if step.source is None:
            return None
        if isinstance(step.source, PlannedOp):
            return self._kept.pop(step.op)
        return self._exchange.receive(step.source)


def _required(result: Tensor | None, step: Step) -> Tensor:
    if result is None:
        raise ValueError(f"op {step.op} gave no result; it goes to another op")
    return result
