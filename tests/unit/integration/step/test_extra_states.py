# SPDX-License-Identifier: Apache-2.0
"""Modules' extra state on its way between workers, which are threads here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.integration.progress import ContractBroken
from megatron_resihp.integration.state.extra_state import ExtraState
from megatron_resihp.integration.step.extra_states import move_extra_state, moves_to_standbys, share_extra_state
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Shard
from megatron_resihp.plan.slices import WHOLE, Move, Slice

LAYERS = (Chunk(0, 0, 4),)
WHOLE_MODEL = (Shard(0, 4, 0, 1),)
ALONE = ParallelPlan((Replica(((0,),), (0,), LAYERS),), {1: WHOLE_MODEL})
WAIT_S = 10.0
# Made in C, hence under the lock of the interpreter: two threads that ask for one at once get the same.
Group = defaultdict[tuple[int, int], "SimpleQueue[torch.Tensor]"]


class Layer(torch.nn.Module):
    """One with a history. `deaf`: it takes none."""

    def __init__(self, *history: float, deaf: bool = False) -> None:
        super().__init__()
        self.history, self._deaf = torch.tensor(history), deaf

    def get_extra_state(self) -> Any:
        return {"history": self.history} if self.history.numel() else None

    def set_extra_state(self, state: Any) -> None:
        self.history = self.history if self._deaf else state["history"].clone()


def model(*layers: Layer) -> Any:
    chunk = torch.nn.ModuleDict({"decoder": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})})
    return SimpleNamespace(model=[chunk])


class Member:
    """One worker's end of the group of all."""

    def __init__(self, worker: int, between: Group) -> None:
        self._worker, self._between = worker, between

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self._between[self._worker, target].put(tensor.clone())

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self._between[source, self._worker].get(timeout=WAIT_S))


def worker(number: int, plan: ParallelPlan, live: Any, between: Group, shards: tuple[Shard, ...] | None = None) -> Any:
    held = SimpleNamespace(
        live=live, extra=ExtraState(), shards=plan.shards_of(number) if shards is None else shards
    )  # fmt: skip
    return SimpleNamespace(
        worker=number, held=held, mode=SimpleNamespace(everybody=Member(number, between)),
        view=SimpleNamespace(plan=plan, works=number in plan.working),
        job=SimpleNamespace(own=SimpleNamespace(chunks=LAYERS)),
    )  # fmt: skip


def together(calls: Mapping[int, Any]) -> dict[int, Any]:
    """All workers' calls at the same time; what they return."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = {number: threads.submit(call) for number, call in calls.items()}
        return {number: future.result(WAIT_S) for number, future in futures.items()}


def enter(workers: Mapping[int, Any], plan: ParallelPlan, new: Mapping[int, Any]) -> dict[int, dict[str, str]]:
    """Take these workers into an epoch with new objects; what they say of their state."""
    held = {number: each.held.shards for number, each in workers.items()}
    order: Any = SimpleNamespace(plan=plan, held=held)
    for number, each in workers.items():
        each.view = SimpleNamespace(plan=plan, works=number in plan.working)
    return together({
        number: lambda number=number, each=each: move_extra_state(each, order, new.get(number, each.held.live))
        for number, each in workers.items()
    })  # fmt: skip


def histories(trained: Any) -> list[list[float]]:
    return [layer.history.tolist() for layer in trained.model[0]["decoder"]["layers"]]


def step(*workers: Any) -> None:
    together({each.worker: lambda each=each: share_extra_state(each) for each in workers})
    for each in workers:
        each.held.extra.adopt()


def test_a_standby_takes_over_what_the_last_step_left() -> None:
    """Not what a broken iteration has made of it; a worker without any gets it, too."""
    between, live = Group(SimpleQueue), model(Layer(1), Layer(2))
    first, standby = worker(0, ALONE, live, between), worker(1, ALONE, model(Layer(), Layer()), between)
    step(first, standby)
    for layer in live.model[0]["decoder"]["layers"]:
        layer.history += 10
    together({each.worker: lambda each=each: share_extra_state(each) for each in (first, standby)})
    two = ParallelPlan((Replica(((1,),), (0,), LAYERS), Replica(((2,),), (1,), LAYERS)))
    joining = worker(2, two, model(Layer(), Layer()), between, shards=())
    new = {1: model(Layer(), Layer()), 2: model(Layer(), Layer())}
    said = enter({1: standby, 2: joining}, two, new)
    assert histories(new[1]) == histories(new[2]) == [[1], [2]]
    assert said[1] == said[2] and sorted(said[1]) == ["1/-2/1", "2/-2/1"]


def test_it_has_no_cuts() -> None:
    """A worker of another degree gets it from one that holds a part of the layer."""
    between = Group(SimpleQueue)
    halves = ParallelPlan((Replica(((0, 1),), (0,), LAYERS),))
    old = {number: worker(number, halves, model(Layer(3), Layer(4)), between) for number in range(2)}
    step(*old.values())
    alone = ParallelPlan((Replica(((2,),), (0,), LAYERS),), {0: None, 1: None})
    joining = worker(2, alone, model(Layer(), Layer()), between, shards=())
    new = model(Layer(), Layer())
    enter({**old, 2: joining}, alone, {2: new})
    assert histories(new) == [[3], [4]]


def test_a_module_that_does_not_take_it_trains_no_further() -> None:
    between = Group(SimpleQueue)
    plan = ParallelPlan((Replica(((0,),), (0,), LAYERS),))
    own = worker(0, plan, model(Layer(1), Layer(2)), between)
    step(own)
    with pytest.raises(ContractBroken, match="extra state"):
        enter({0: own}, plan, {0: model(Layer(), Layer(deaf=True))})


def test_a_standby_gets_it_from_workers_that_work_on_its_layers() -> None:
    """Whatever cuts of them it keeps."""
    replica = Replica(((0, 1), (2,)), (0,), (Chunk(0, 0, 2), Chunk(1, 2, 4)))
    plan = ParallelPlan((replica,), {3: (Shard(1, 3, 1, 4),), 4: None})
    assert moves_to_standbys(plan) == [Move(0, 3, (Slice(1, WHOLE),)), Move(2, 3, (Slice(2, WHOLE),))]


def test_workers_with_work_get_nothing() -> None:
    """They make it themselves in their forward passes."""
    replicas = tuple(Replica(((number,),), (number,), LAYERS) for number in range(2))
    assert moves_to_standbys(ParallelPlan(replicas)) == []
