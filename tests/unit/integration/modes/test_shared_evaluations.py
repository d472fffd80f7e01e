# SPDX-License-Identifier: Apache-2.0
"""Replicas of a heterogeneous plan evaluate together, and each that has a head knows all losses afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from megatron_resihp.executor.messages import Message
from megatron_resihp.integration.modes.shared_evaluations import SharedEvaluations
from megatron_resihp.integration.ops.program_schedule import EVALUATED_TOGETHER, evaluation_routes, run_evaluation
from megatron_resihp.integration.world.heterogeneous import HeterogeneousView
from megatron_resihp.plan import Chunk, ParallelPlan, Replica

PLAN = ParallelPlan(
    (
        Replica(((0,), (1,)), (0, 1), (Chunk(0, 0, 3), Chunk(1, 3, 6))),
        Replica(((2, 3),), (2, 3), (Chunk(0, 0, 6),)),
    ),
    {4: None},
)
"""The heads are of worker 1, and of workers 2 and 3."""


def args(**changed: Any) -> Any:
    return SimpleNamespace(**{"eval_iters": 1, "eval_global_batch_size": 6, "eval_micro_batch_size": 2} | changed)


class Groups:
    """Groups whose members call one after another; the sum is that of all, as they were given."""

    def __init__(self, others: torch.Tensor | None = None) -> None:
        self.made: list[tuple[str, tuple[int, ...]]] = []
        self.given: list[torch.Tensor] = []
        self._others = others

    def make(self, name: str, workers: Sequence[int]) -> Any:
        self.made.append((name, tuple(workers)))
        return self

    def sum(self, values: torch.Tensor) -> None:
        self.given.append(values.clone())
        if self._others is not None:
            values += self._others


def shared(worker: int, groups: Groups, **changed: Any) -> SharedEvaluations:
    return SharedEvaluations(args(**changed), HeterogeneousView(PLAN, worker, None), groups.make)


def reported(*losses: float) -> list[dict[str, Any]]:
    """A sum and its number of tokens, as Megatron's loss function reports them, and a number alone."""
    return [{"lm loss": torch.tensor([loss, 32.0]), "aux": torch.tensor(loss / 3)} for loss in losses]


def test_all_heads_know_the_losses_of_all_micro_batches() -> None:
    """Of the three the first replica evaluates two. Of two members of a head one tells."""
    views = {worker: HeterogeneousView(PLAN, worker, None) for worker in (1, 2, 3)}
    assert {worker: tuple(view.evaluation_order(3)) for worker, view in views.items()} == {1: (0, 1), 2: (2,), 3: (2,)}
    own = {1: reported(0.1, 0.2), 2: reported(0.3), 3: reported(0.3)}
    told = {}
    for worker, view in views.items():
        groups = Groups()
        shared(worker, groups).losses(view.evaluation_order(3), own[worker], 3)
        assert groups.made == [("evaluations", (1, 2, 3))]
        [told[worker]] = groups.given
    assert not told[2].any(), "worker 3 tells of both"
    for worker, view in views.items():
        others = sum((rows for other, rows in told.items() if other != worker), torch.zeros(3, 3).double())
        found = shared(worker, Groups(others)).losses(view.evaluation_order(3), own[worker], 3)
        for each, expected in zip(found, reported(0.1, 0.2, 0.3), strict=True):
            assert each.keys() == expected.keys()
            assert all(torch.equal(each[name], expected[name]) for name in each), "bit for bit"
            assert all(each[name].dtype == expected[name].dtype for name in each)


def test_who_has_no_head_has_no_part_in_that() -> None:
    for worker in (0, 4):
        groups = Groups()
        assert shared(worker, groups).losses((), [], 3) == [] and not groups.made


def test_one_replica_has_nobody_to_tell() -> None:
    """There is one micro-batch only; or none, without evaluations."""
    for changed in ({"eval_global_batch_size": 2}, {"eval_iters": 0}, {"eval_iters": None}):
        groups = Groups()
        losses = reported(0.1)
        assert shared(1, groups, **changed).losses((0,), losses, 1) is losses and not groups.made


def test_what_is_sent_does_not_stay_in_memory_until_an_evaluation_ends() -> None:
    count = 10 * EVALUATED_TOGETHER
    steps = evaluation_routes(HeterogeneousView(PLAN, 0, None), count, False, 4, False)
    assert len(steps) == count // 2
    exchange = _Exchange()
    work: Any = SimpleNamespace(forward=lambda *_: torch.zeros(1), batches=SimpleNamespace(finish=lambda: None))
    run_evaluation(work, steps, exchange, (2, 8))  # type: ignore[arg-type]
    assert exchange.most == EVALUATED_TOGETHER and not exchange.under_way


class _Exchange:
    """Counts what is being sent."""

    def __init__(self) -> None:
        self.under_way: set[Message] = set()
        self.most = 0

    def connect(self, steps: Any) -> None: ...

    @contextmanager
    def carrying(self, row: tuple[int, ...]) -> Iterator[None]:
        yield

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        self.under_way.add(message)
        self.most = max(self.most, len(self.under_way))

    def finish(self) -> None:
        self.under_way.clear()
