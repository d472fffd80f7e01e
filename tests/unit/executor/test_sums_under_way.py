# SPDX-License-Identifier: Apache-2.0
"""Sums on a thread of their own: in one order, each when its gradients are final. Any workers get through them."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_plans import draw_case

from megatron_resihp.executor.direct.order import Meeting
from megatron_resihp.executor.direct.order_check import check_meetings
from megatron_resihp.executor.routes import RouteError
from megatron_resihp.executor.slice_sums import Bucket, make_buckets
from megatron_resihp.executor.sums_under_way import SumsUnderWay
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.slices import TIED, WHOLE, Slice, all_shards, cuts_of, holders_of

PATIENCE_S = 20.0


class Passed:
    """A moment of the device's work, as noted by whoever waits for it."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


class Noting:
    """A group of two workers, the other of which has ones everywhere."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sums = threading.Semaphore(0)
        self._error = error

    def sum(self, values: torch.Tensor) -> None:
        if self._error is not None:
            raise self._error
        values += 1.0
        self.sums.release()


def begin(*layers: int, group: Any, norms: bool = False) -> tuple[SumsUnderWay, dict[int, torch.Tensor]]:
    """Sums of one slice for each layer, whose gradient has its number everywhere."""
    gradients = {layer: torch.full((4,), float(layer)) for layer in layers}
    views = {Slice(layer, 0): [("weight", gradient)] for layer, gradient in gradients.items()}
    buckets = [Bucket((piece,), group) for piece in views]
    sums = SumsUnderWay(buckets, views, set(views), norms, nullcontext)
    sums.begin()
    return sums, gradients


def test_a_sum_begins_when_its_gradients_are_final_and_those_before_it_are_summed() -> None:
    group: Any = Noting()
    sums, gradients = begin(3, 2, 1, group=group)
    sums.final(1, [])
    sums.final(0, [moment := Passed()])
    for _ in range(2):
        assert group.sums.acquire(timeout=PATIENCE_S)
    assert moment.waits == 1 and gradients[1].tolist() == [1.0] * 4
    sums.final(2, [])
    sums.finish()
    assert {layer: float(gradient[0]) for layer, gradient in gradients.items()} == {3: 4.0, 2: 3.0, 1: 2.0}


def test_norms_are_of_what_was_there_before_the_sums() -> None:
    sums, _ = begin(3, 2, group=Noting(), norms=True)
    for number in range(2):
        sums.final(number, [])
    sums.finish()
    assert [float(norm) for norm in sums.norms] == [6.0, 4.0]


def test_an_error_of_a_sum_is_raised_where_it_is_waited_for_and_nothing_is_summed_after_it() -> None:
    sums, gradients = begin(2, 1, group=Noting(ConnectionError("peer is gone")))
    for number in range(2):
        sums.final(number, [])
    with pytest.raises(ConnectionError, match="peer is gone"):
        sums.finish()
    assert gradients[1].tolist() == [1.0] * 4


def test_sums_that_are_given_up_wait_for_no_gradients() -> None:
    sums, gradients = begin(2, 1, group=Noting())
    sums.final(1, [])
    sums.join()
    with pytest.raises(RuntimeError, match="2 of 2 buckets of gradients are not summed"):
        sums.finish()
    assert gradients[2].tolist() == [2.0] * 4 and gradients[1].tolist() == [1.0] * 4


def test_a_failed_sum_keeps_no_group_once_it_is_let_go_of() -> None:
    """Or the collector frees the group later, in a thread in which that may take for ever."""
    group = Noting(ConnectionError("peer is gone"))
    freed = weakref.ref(group)
    sums, _ = begin(1, group=group)
    sums.final(0, [])
    gc.collect()
    gc.disable()
    try:
        sums.join()
        del sums, group
        assert freed() is None
    finally:
        gc.enable()


class Together:
    """A group whose sums begin when all of its workers have come, as gloo's do."""

    def __init__(self, size: int) -> None:
        self._barrier, self._lock = threading.Barrier(size), threading.Lock()
        self._total: torch.Tensor | None = None

    def sum(self, values: torch.Tensor) -> None:
        self._barrier.wait(PATIENCE_S)
        with self._lock:
            self._total = values.clone() if self._total is None else self._total + values
        self._barrier.wait(PATIENCE_S)
        assert self._total is not None
        values.copy_(self._total)
        if self._barrier.wait(PATIENCE_S) == 0:
            self._total = None
        self._barrier.wait(PATIENCE_S)


def draw(seed: int, tied: bool) -> tuple[ParallelPlan, dict[Slice, tuple[int, ...]]]:
    """A plan, and the holders of its slices. Some have a standby, which keeps what one of the workers holds."""
    source = random.Random(seed)
    plan = draw_case(source).plan
    if source.random() < 0.5:
        plan = replace(plan, standbys={100: plan.shards_of(source.choice(plan.working))})
    shards = all_shards(plan)
    cuts = cuts_of(shard for own in shards.values() for shard in own)
    return plan, holders_of(shards, cuts, plan.replicas[0].chunks[-1].end - 1 if tied else None)


def meetings_of(plan: ParallelPlan, holders: dict[Slice, tuple[int, ...]]) -> dict[int, list[Meeting]]:
    """The sums of each worker, in its order."""

    def make_group(name: str, workers: Sequence[int]) -> Any:
        return workers

    found: dict[int, list[Meeting]] = {}
    for worker in plan.members:
        shared = [(each.slices, each.group) for each in make_buckets(holders, worker, make_group) if each.group]
        found[worker] = [
            Meeting(("give", hash(slices)), tuple(other for other in cast(Any, workers) if other != worker))
            for slices, workers in shared
        ]
    return found


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.booleans())
def test_no_workers_of_any_plan_wait_for_each_other(seed: int, tied: bool) -> None:
    """Whatever stages and replicas hold: each sum comes to all of its workers in their order."""
    check_meetings(meetings_of(*draw(seed, tied)))


@given(st.integers(0, 10**6))
def test_a_worker_with_another_order_would_be_noticed(seed: int) -> None:
    found = meetings_of(*draw(seed, True))
    pairs = [(worker, number) for worker, own in found.items() for number in range(len(own) - 1)
             if set(own[number].peers) & set(own[number + 1].peers)]  # fmt: skip
    assume(pairs)
    worker, number = random.Random(seed).choice(pairs)
    found[worker][number : number + 2] = reversed(found[worker][number : number + 2])
    with pytest.raises(RouteError, match="which never come there"):
        check_meetings(found)


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.booleans())
def test_workers_of_any_plan_get_through_in_whatever_order_their_gradients_become_final(seed: int, tied: bool) -> None:
    """Stages and replicas with any cuts hold other slices each, and finish them in any order."""
    source = random.Random(seed)
    plan, holders = draw(seed, tied)
    groups: dict[str, Any] = {}

    def make_group(name: str, workers: Any) -> Any:
        return groups.setdefault(name, Together(len(workers)))

    found: dict[Slice, list[torch.Tensor]] = defaultdict(list)
    under_way = []
    for worker in plan.members:
        buckets = [each for each in make_buckets(holders, worker, make_group) if not each.is_whole]
        gradients = {piece: torch.ones(2) for bucket in buckets for piece in bucket.slices}
        views = {piece: [("weight", gradient)] for piece, gradient in gradients.items()}
        sums = SumsUnderWay(buckets, views, set(views), False, nullcontext)
        sums.begin()
        under_way.append((sums, source.sample(range(len(buckets)), len(buckets))))
        for piece, gradient in gradients.items():
            found[piece].append(gradient)
    for sums, order in under_way:
        for number in order:
            sums.final(number, [])
    for sums, _ in under_way:
        sums.finish()
    for piece, gradients_of in found.items():
        assert [each.tolist() for each in gradients_of] == [[float(len(holders[piece]))] * 2] * len(holders[piece])


def test_the_last_layers_come_first_and_what_is_whole_last() -> None:
    """As backward passes finish them; embeddings that are the head, too, are finished with the first layer."""
    holders = {Slice(*place): (0,) for place in ((TIED, 0), (0, WHOLE), (1, 0), (2, 0), (2, 1), (2, WHOLE))}
    buckets = make_buckets(holders, 0, lambda name, workers: pytest.fail("nobody else holds any"))
    assert [bucket.slices for bucket in buckets] == [
        (Slice(2, 0), Slice(2, 1)), (Slice(1, 0),), (Slice(TIED, 0),), (Slice(0, WHOLE), Slice(2, WHOLE)),
    ]  # fmt: skip
    assert [bucket.is_whole for bucket in buckets] == [False, False, False, True]
