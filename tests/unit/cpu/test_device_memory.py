# SPDX-License-Identifier: Apache-2.0
"""The stand-in's device with a memory of a given size: what counts, what comes free, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_resihp.cpu import device_memory
from megatron_resihp.cpu.device_memory import DeviceMemory, place, resizing

SIZE = 10_000
FLOATS = 1000
BYTES = 4 * FLOATS


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMemory]:
    memory = DeviceMemory(SIZE)
    monkeypatch.setattr(device_memory, "_memory", memory)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resizing(torch.UntypedStorage.resize_))
    with memory:
        yield memory


def on_device() -> torch.Tensor:
    tensor: torch.Tensor = place(torch.ones(FLOATS))
    return tensor


def test_results_of_what_is_on_the_device_are_there_too(memory: DeviceMemory) -> None:
    first = on_device()
    second = first + 1
    assert memory.allocated == 2 * BYTES
    view = second.view(10, 100)
    del second
    assert memory.allocated == 2 * BYTES, "a view keeps it"
    del view, first
    assert memory.allocated == 0 and memory.peak == 2 * BYTES


def test_gradients_count(memory: DeviceMemory) -> None:
    parameter = torch.nn.Parameter(on_device())
    (parameter * 2.0).sum().backward()
    assert parameter.grad is not None and memory.allocated == 2 * BYTES


def test_host_memory_is_none_of_it(memory: DeviceMemory) -> None:
    tensor, host = on_device(), torch.empty(FLOATS)
    host.copy_(tensor)
    assert memory.allocated == BYTES and torch.equal(host.clone(), tensor)


def test_a_storage_that_is_freed_gives_back(memory: DeviceMemory) -> None:
    tensor = on_device()
    tensor.untyped_storage().resize_(0)
    assert memory.allocated == 0
    tensor.untyped_storage().resize_(BYTES)
    assert memory.allocated == BYTES


def test_what_does_not_fit_is_refused(memory: DeviceMemory) -> None:
    kept = [on_device(), on_device()]
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4000 bytes; of 10000, 8000 are in use"):
        kept.append(kept[0].clone())
    assert memory.allocated == 2 * BYTES
    kept[0].untyped_storage().resize_(0)
    on_device()
