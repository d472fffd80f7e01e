# SPDX-License-Identifier: Apache-2.0
"""When gradients are final: as the last backward op of their chunk has added to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_resihp.integration.ops.final_gradients import FinalGradients, Watched
from megatron_resihp.plan import PlannedOp


def F(chunk: int, micro_batch: int) -> PlannedOp:
    return PlannedOp("F", chunk, micro_batch)


def B(chunk: int, micro_batch: int) -> PlannedOp:
    return PlannedOp("B", chunk, micro_batch)


def parameter() -> Any:
    """With Megatron's hook, which adds its gradient to the sum of all micro-batches."""
    found: Any = torch.nn.Parameter(torch.ones(2))
    found.main_grad = torch.zeros(2)
    found.node = found.expand_as(found).grad_fn.next_functions[0][0]

    def add(*_: Any) -> None:
        found.main_grad.add_(found.grad)
        found.grad = None

    found.node.register_hook(add)
    return found


class Told:
    """What was told, with the sums of gradients at that moment."""

    def __init__(self, watched: Sequence[Watched], ops: Sequence[PlannedOp]) -> None:
        self.found: list[tuple[int, float]] = []
        self._of = {each.number: each.parameter for each in watched}
        self.final = FinalGradients(watched, ops, self._tell, lambda: None)

    def _tell(self, number: int, moments: list[Any]) -> None:
        self.found.append((number, float(self._of[number].main_grad[0]) if number in self._of else 0.0))


def test_of_a_chunks_last_op_each_gradient_once_it_is_added() -> None:
    """The second layer's before the first one's, while the pass goes on; and of no earlier op."""
    first, second = parameter(), parameter()
    told = Told([Watched(first, 0, 1, True), Watched(second, 0, 0, True)], [F(0, 0), F(0, 1), B(0, 0), B(0, 1)])
    told.final.begin(range(2))
    for op in (B(0, 0), B(0, 1)):
        assert not told.found
        with told.final.watching(op):
            if op == B(0, 0):
                (first * second).sum().backward()
            else:
                _in_turn(first, second, told)
    assert told.found == [(0, 2.0), (1, 2.0)]


def _in_turn(first: Any, second: Any, told: Told) -> None:
    """A pass whose part behind the first layer is over before that layer's begins."""
    between = (first * 1.0).detach().requires_grad_()
    (between * second).sum().backward()
    assert told.found == [(0, 2.0)], "not before the pass has come to the first layer"
    first.backward(between.grad)


def test_what_needs_several_gradients_waits_for_all_of_them_in_any_chunk() -> None:
    """As word embeddings do that are in a worker's first chunk and in its last."""
    early, late = parameter(), parameter()
    told = Told([Watched(early, 0, 0, True), Watched(late, 3, 0, True)], [B(3, 0), B(0, 0)])
    for chunk, each in ((3, late), (0, early)):
        assert not told.found
        with told.final.watching(B(chunk, 0)):
            each.sum().backward()
    assert told.found == [(0, 1.0)]


def test_gradients_without_hooks_are_final_when_the_op_is_over() -> None:
    """Those of W, of what may be added to several times in a pass, and what a pass has not come to."""
    unhooked, unused, by_w = parameter(), parameter(), parameter()
    watched = [Watched(unhooked, 0, 0, False), Watched(unused, 0, 1, True), Watched(by_w, 1, 2, True)]
    told = Told(watched, [B(0, 0), B(1, 0), PlannedOp("W", 1, 0)])
    with told.final.watching(B(0, 0)):
        unhooked.sum().backward()
        unhooked.sum().backward()
        assert not told.found
    assert told.found == [(0, 2.0), (1, 0.0)]
    with told.final.watching(B(1, 0)):
        by_w.sum().backward()
    assert len(told.found) == 2
    with told.final.watching(PlannedOp("W", 1, 0)):
        by_w.main_grad += 5.0
    assert told.found[2:] == [(2, 6.0)]


def test_what_no_op_adds_to_is_final_at_once() -> None:
    told = Told([Watched(parameter(), 1, 0, True)], [F(0, 0), B(0, 0)])
    told.final.begin(range(2))
    assert sorted(told.found) == [(0, 0.0), (1, 0.0)], "the second one has no parameters"


def test_a_second_gradient_in_one_pass_is_an_error() -> None:
    """Rather than a sum without it: what is forgotten and computed again in parts adds for each part."""
    weight = parameter()
    told = Told([Watched(weight, 0, 0, True)], [B(0, 0)])
    given = torch.ones(2, requires_grad=True)
    for _ in range(2):
        given = checkpoint(lambda x: x * weight, given, use_reentrant=True)
    with pytest.raises(RuntimeError, match="twice"), told.final.watching(B(0, 0)):
        given.sum().backward()


def test_hooks_are_gone_after_the_op() -> None:
    """Also after one that has failed: an iteration that is repeated begins anew."""
    weight = parameter()
    told = Told([Watched(weight, 0, 0, True)], [B(0, 0)])
    with pytest.raises(ZeroDivisionError), told.final.watching(B(0, 0)):
        raise ZeroDivisionError
    weight.sum().backward()
    assert not told.found
