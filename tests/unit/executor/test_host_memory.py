# SPDX-License-Identifier: Apache-2.0
"""Host memory between a device and gloo: waited for, and used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from late_copies import LateCopies

from megatron_resihp.executor import host_memory
from megatron_resihp.executor.host_memory import CudaCopies, HostMemory, host_memory_of


def test_values_are_there_once_they_are_ready() -> None:
    memory, tensor = HostMemory(LateCopies()), torch.randn(6, 4)[:, 1:3]
    leaving = memory.out(tensor)
    assert torch.equal(leaving.ready(), tensor)
    assert leaving.ready().is_contiguous()


def test_an_iteration_takes_no_more_memory_than_the_one_before() -> None:
    copies = LateCopies()
    memory = HostMemory(copies)
    for _ in range(3):
        first, second = memory.out(torch.ones(100)), memory.out(torch.ones(90))
        for leaving in (first, second):
            leaving.ready()
            leaving.free()
        received = memory.room(5, torch.bfloat16)
        received.fill_(2.0)
        assert torch.equal(memory.take_to(torch.device("cpu"), received), torch.full((5,), 2.0, dtype=torch.bfloat16))
    assert copies.allocated == [512, 512, 16]


def test_an_epoch_begins_without_the_memory_of_the_last() -> None:
    copies = LateCopies()
    memory = HostMemory(copies)

    def use() -> None:
        memory.take_to(torch.device("cpu"), memory.room(4, torch.float32))

    use()
    use()
    assert copies.allocated == [16]
    memory.give_back()
    use()
    assert (copies.allocated, copies.given_back) == ([16, 16], 1)


def test_what_is_kept_takes_a_little_pinned_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it is."""
    monkeypatch.setattr(host_memory, "PIECE", 64)
    copies, tensor = LateCopies(), torch.randn(10, 30)
    memory, kept, back = HostMemory(copies), torch.empty(10, 30), torch.empty(10, 30)
    memory.keep(tensor, kept)
    assert torch.equal(kept, tensor)
    memory.bring_back(kept, back)
    assert torch.equal(back, tensor)
    assert copies.allocated == [64, 64]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that were asked of a host that pins up to 100 bytes at once."""
    asked: list[int] = []
    plain = torch.empty

    def empty(size: Any, *positional: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            asked.append(size)
            if size > 100:
                raise RuntimeError("CUDA error: out of memory")
        return plain(size, *positional, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    return asked


def test_where_the_host_pins_no_more_other_memory_does(pinned: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    memory = HostMemory(CudaCopies())
    rooms = [memory.room(size, torch.uint8) for size in (64, 1 << 20, 1 << 20)]
    assert [len(room) for room in rooms] == [64, 1 << 20, 1 << 20] and pinned == [64, 1 << 20, 1 << 20]
    assert capfd.readouterr().err == "resihp: no more pinned memory for 1 MiB, so copies are slower\n", "told once"
    for room in rooms:
        memory.free(room)
    assert [len(memory.room(size, torch.uint8)) for size in (64, 1 << 20)] == [64, 1 << 20]
    assert pinned == [64, 1 << 20, 1 << 20], "used again"


def test_other_errors_of_the_device_are_raised(monkeypatch: pytest.MonkeyPatch, pinned: list[int]) -> None:
    def refuse(*positional: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")

    copies = CudaCopies()
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match="device-side assert"):
        copies.allocate(16)


def test_memory_is_not_used_again_while_it_is_copied_back() -> None:
    copies = LateCopies()
    copies.back_is_slow = True
    memory = HostMemory(copies)
    for _ in range(2):
        memory.take_to(torch.device("cpu"), memory.room(4, torch.float32))
    assert copies.allocated == [16, 16]


def test_tensors_of_the_host_stay_where_they_are() -> None:
    tensor = torch.ones(3)
    leaving = host_memory_of(tensor.device).out(tensor)
    leaving.ready().add_(1.0)
    leaving.back(tensor)
    assert torch.equal(tensor, torch.full((3,), 2.0))
