# SPDX-License-Identifier: Apache-2.0
"""A copy of a part of a distributed optimizer takes its owner's steps, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_copies import LateCopies

from megatron_resihp.executor import host_memory
from megatron_resihp.executor.host_memory import HostMemory
from megatron_resihp.integration.step import optimizer_copy
from megatron_resihp.integration.step.optimizer_copy import PartCopy
from megatron_resihp.integration.step.optimizer_shards import MASTER, Entry, Matrix, Place
from megatron_resihp.plan.ranges import Range

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE", 64)


SIZES = (7, 130, 33)
GROUPS = (0, 1, 0)
"""Of each range's parameter: with weight decay or without."""


def optimizer(masters: list[torch.Tensor]) -> Any:
    groups = [
        {"params": [master for master, group in zip(masters, GROUPS, strict=False) if group == index],
         "weight_decay": decay}
        for index, decay in enumerate((0.1, 0.0))
    ]  # fmt: skip
    inner = torch.optim.AdamW([torch.zeros(1)], lr=0.1)
    inner.param_groups = [{**inner.param_groups[0], **group} for group in groups]
    return SimpleNamespace(optimizer=inner, config=SimpleNamespace(clip_grad=0.0))


@contextmanager
def largest_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of masters in each step that an optimizer takes meanwhile."""
    found: list[int] = []
    step = torch.optim.AdamW.step

    def noted(optimizer: torch.optim.AdamW) -> None:
        found.append(sum(master.nbytes for group in optimizer.param_groups for master in group["params"]))
        step(optimizer)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", noted)
        yield found


@pytest.mark.parametrize("memory", [None, HostMemory(LateCopies())], ids=["host", "device"])
@pytest.mark.parametrize("load", [optimizer_copy.LOAD, 64])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_it_is_what_the_owner_has_after_every_step(
    monkeypatch: pytest.MonkeyPatch, scale: float | None, memory: HostMemory | None, load: int
) -> None:
    """Also if its buddy has no parameter of a group, where the learning rate changes, and with a loss scale.

    To a device and back it goes in pieces, and a range that is too large for the device is stepped in several.
    """
    monkeypatch.setattr(optimizer_copy, "LOAD", load)
    inverse = None if scale is None else 1 / scale
    torch.manual_seed(0)
    masters = [torch.randn(size) for size in SIZES]
    owner, buddy = optimizer(masters), optimizer([torch.randn(4)])
    part = {
        Range(f"p{index}", 3, 3 + master.numel()): Entry(Place(0, group), {MASTER: master.clone()})
        for index, (master, group) in enumerate(zip(masters, GROUPS, strict=True))
    }
    copy = PartCopy(0, part, memory=memory)
    for step in range(4):
        for group in (*owner.optimizer.param_groups, *buddy.optimizer.param_groups):
            group["lr"] = 0.1 / (1 + step)
        gradients = [torch.randn_like(master) for master in masters]
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        owner.optimizer.step()
        copy.gradient = torch.cat(gradients) * (scale or 1.0)
        with largest_step(monkeypatch) as largest:
            copy.prepare_step(buddy, 1.0, inverse, HOST)
            stepped = copy.part.values()
        assert 0 < max(largest) <= load
        for master, entry in zip(masters, stepped, strict=True):
            expected = {MASTER: master, **owner.optimizer.state[master]}
            assert expected.keys() == entry.tensors.keys()
            assert all(torch.equal(entry.tensors[name], tensor) for name, tensor in expected.items())
    assert copy.gradient is None and copy.cost.steps == 4
    assert copy.nbytes == sum(3 * 4 * size + 4 for size in SIZES)
    assert len(buddy.optimizer.state) == 0


def test_steps_that_are_counted_for_groups() -> None:
    """As fused optimizers do; a buddy that stands by counts none itself."""
    seen: list[Any] = []

    class Counting:
        def __init__(self) -> None:
            self.param_groups = [{"params": [], "lr": 1.0, "step": 1}]
            self.state: dict[torch.Tensor, dict[str, Any]] = {}

        def step(self) -> None:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                seen.append((group["step"], len(group["params"])))
                for parameter in group["params"]:
                    parameter -= parameter.grad
                    self.state[parameter] = {}

    buddy = SimpleNamespace(optimizer=Counting(), config=SimpleNamespace(clip_grad=0.0))
    copy = PartCopy(2, {Range("p", 0, 2): Entry(Place(0, 0), {MASTER: torch.ones(2)})}, counted=6)
    copy.gradient = torch.ones(2)
    copy.prepare_step(buddy, 1.0, None, HOST)
    assert copy.counted == 7 and seen == [(7, 1)]
    assert buddy.optimizer.param_groups[0]["step"] == 1
    assert torch.equal(copy.part[Range("p", 0, 2)].tensors[MASTER], torch.zeros(2))


def test_groups_of_masters_are_as_long_as_what_is_stepped() -> None:
    """Apex's optimizer pairs a group's parameters with masters of its own, here those of a worker that has others; and
    no group may be empty."""

    class Paired(torch.optim.SGD):
        def __init__(self, masters: list[torch.Tensor]) -> None:
            super().__init__([{"params": masters}, {"params": [torch.zeros(1)]}], lr=1.0)
            self.param_groups_master = [{"params": [None] * len(group["params"])} for group in self.param_groups]

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group, of_masters in zip(self.param_groups, self.param_groups_master, strict=False):
                assert group["params"][0].device == HOST
                for master, _ in zip(group["params"], of_masters["params"], strict=False):
                    master -= master.grad

    buddy = SimpleNamespace(optimizer=Paired([torch.zeros(1)]), config=SimpleNamespace(clip_grad=0.0))
    names = (Range("p", 0, 2), Range("q", 0, 2))
    copy = PartCopy(2, {name: Entry(Place(0, 0), {MASTER: torch.ones(2)}) for name in names})
    copy.gradient = torch.ones(4)
    copy.prepare_step(buddy, 1.0, None, HOST)
    assert all(torch.equal(entry.tensors[MASTER], torch.zeros(2)) for entry in copy.part.values())
    assert [len(group["params"]) for group in buddy.optimizer.param_groups_master] == [1, 1]


class ByMatrix(torch.optim.Optimizer):
    """Steps by a product of matrices, and by halves where told so, in a precision that is the whole process's."""

    def __init__(self, masters: list[torch.Tensor]) -> None:
        super().__init__(masters, {"lr": 0.1, "momentum": 0.9})
        self.scaled_orthogonalize_fn = lambda moment: moment @ moment.mT @ moment

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert threading.current_thread() is threading.main_thread()
        for group in self.param_groups:
            for master in group["params"]:
                state = self.state[master]
                state.setdefault("momentum_buffer", torch.zeros_like(master)).lerp_(master.grad, 1 - group["momentum"])
                halves = state["momentum_buffer"].split(getattr(master, "qkv_split_shapes", [master.shape[0]]))
                master.sub_(torch.cat([self.scaled_orthogonalize_fn(half) for half in halves]), alpha=group["lr"])


@pytest.mark.parametrize("memory", [None, HostMemory(LateCopies())], ids=["host", "device"])
def test_matrices_are_stepped_whole_and_while_nothing_else_computes(memory: HostMemory | None) -> None:
    """Beside numbers that another optimizer of the owner's steps, and counts their steps."""
    torch.manual_seed(0)
    masters: list[Any] = [torch.randn(6, 5), torch.randn(4, 9)]
    masters[1].qkv_split_shapes = [3, 1]
    numbers = torch.randn(7)
    muon, adam = ByMatrix(masters), torch.optim.AdamW([numbers], lr=0.1)
    clipless = SimpleNamespace(clip_grad=0.0)
    buddy = SimpleNamespace(chained_optimizers=[
        SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=ByMatrix([torch.zeros(1)]), config=clipless)]),
        SimpleNamespace(optimizer=torch.optim.AdamW([torch.zeros(1)], lr=0.1), config=clipless),
    ])  # fmt: skip
    places = [Place(0, 0, Matrix((6, 5), {})), Place(0, 0, Matrix((4, 9), {"qkv_split_shapes": [3, 1]})), Place(1, 0)]
    owned = [*masters, numbers]
    part = {Range(f"p{index}", 0, each.numel()): Entry(place, {MASTER: each.flatten().clone()})
            for index, (each, place) in enumerate(zip(owned, places, strict=True))}  # fmt: skip
    copy = PartCopy(0, part, memory=memory)
    for _ in range(3):
        gradients = [torch.randn_like(each) for each in owned]
        for each, gradient in zip(owned, gradients, strict=True):
            each.grad = gradient
        muon.step()
        adam.step()
        copy.gradient = torch.cat([gradient.flatten() for gradient in gradients])
        copy.prepare_step(buddy, 1.0, None, HOST)
        for each, entry in zip(owned, copy.part.values(), strict=True):
            expected = {MASTER: each, **(muon if each.dim() > 1 else adam).state[each]}
            assert expected.keys() == entry.tensors.keys()
            assert all(torch.equal(entry.tensors[name], tensor.view(entry.tensors[name].shape))
                       for name, tensor in expected.items())  # fmt: skip


def test_no_part_of_a_copy_is_left_behind() -> None:
    """The owner may have another optimizer for some layers than the holder, whose objects another plan built."""
    buddy = SimpleNamespace(optimizer=torch.optim.SGD([torch.zeros(1)]), config=SimpleNamespace(clip_grad=0.0))
    copy = PartCopy(2, {Range("p", 0, 2): Entry(Place(1, 0), {MASTER: torch.ones(2)})})
    copy.gradient = torch.ones(2)
    copy.prepare_step(buddy, 1.0, None, HOST)
    with pytest.raises(RuntimeError, match="worker 2 has an optimizer for its part that this worker doesn't have"):
        copy.part  # noqa: B018


def test_a_step_that_is_begun_is_taken_while_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, threads = threading.Event(), list[threading.Thread]()

    def step(copy: PartCopy, *others: Any) -> None:
        threads.append(threading.current_thread())
        assert let_go.wait(30.0)

    monkeypatch.setattr(PartCopy, "_step", step)
    copy = PartCopy(2, {Range("p", 0, 2): Entry(Place(0, 0), {MASTER: torch.ones(2)})})
    copy.gradient = torch.ones(2)
    copy.prepare_step(optimizer([torch.randn(4)]), 1.0, None, HOST)
    assert threads == [], "it waits until it is begun"
    copy.begin_step()
    copy.begin_step()
    let_go.set()
    assert copy.part and copy.cost.steps == 1
    assert threads != [threading.main_thread()] and len(threads) == 1


def test_all_steps_are_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps memory for each stream apart: with one for each step, device memory would fill up."""
    made, used, waited = [], [], []

    def make() -> Any:
        made.append(SimpleNamespace(synchronize=lambda: waited.append(len(made))))
        return made[-1]

    @contextmanager
    def use(stream: Any) -> Iterator[None]:
        used.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "stream", use)
    copy = PartCopy(0, {})
    for _ in range(3):
        with copy._beside_training(torch.device("cuda", 1)):
            pass
    assert len(made) == 1 and used == 3 * made and waited == [1, 1, 1]
