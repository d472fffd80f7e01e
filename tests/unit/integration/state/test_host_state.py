# SPDX-License-Identifier: Apache-2.0
"""The old state in host memory: what is freed, that all of it is there, and its way back."""

from __future__ import annotations

import pytest
import torch
from late_copies import LateCopies
from small_objects import BYTES, trained

from megatron_resihp.executor import host_memory
from megatron_resihp.executor.host_memory import HostMemory
from megatron_resihp.integration.state import host_state
from megatron_resihp.integration.state.footprint import bytes_away, bytes_of, free_gradients, state_tensors, storages
from megatron_resihp.integration.state.host_state import discard, move_to_host, return_to_device
from megatron_resihp.integration.trained import Trained

STEPS = 4
"""Bytes of a count of steps, which is a scalar."""


@pytest.fixture
def live() -> Trained:
    found: Trained = trained()
    free_gradients(found)
    return found


def values(of: Trained) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in state_tensors(of)]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def test_the_device_is_freed_and_the_state_is_what_it_was(live: Trained) -> None:
    before, whole = values(live), bytes_of(live)
    views = [tensor.data for tensor in state_tensors(live) if tensor.dim()]
    move_to_host(live)
    assert all(not view.untyped_storage().nbytes() for view in views)
    assert same(values(live), before) and bytes_away(live) == 3 * BYTES
    assert sum(storages(live).values()) == STEPS and bytes_of(live) == whole


@pytest.mark.parametrize("memory", [None, HostMemory(LateCopies())], ids=["host", "device"])
def test_it_comes_back(live: Trained, memory: HostMemory | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a device it goes in pieces."""
    monkeypatch.setattr(host_memory, "PIECE", 64)
    before, held = values(live), storages(live)
    for _ in range(2):  # a second failure begins the rebuild anew
        move_to_host(live, memory)
        assert same(values(live), before)
        move_to_host(live, memory)
        return_to_device(live, memory)
        assert same(values(live), before) and storages(live) == held and not live.away
    return_to_device(live)


def test_memory_that_a_library_has_lent_is_left_to_it(live: Trained) -> None:
    """As that of messages, where host tensors stand for the device's."""
    parameter = next(live.model[0].module.parameters())
    lent = torch.frombuffer(bytearray(parameter.nbytes), dtype=parameter.dtype)
    parameter.data = lent.view(parameter.shape).copy_(parameter.detach())
    before = values(live)
    move_to_host(live)
    assert same(values(live), before)
    return_to_device(live)
    assert same(values(live), before)
    discard(live)
    assert parameter.shape == before[0].shape


def test_a_host_without_memory_leaves_all_where_it_was(live: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    before, held = values(live), storages(live)
    tried: list[int] = []

    def empty(*sizes: int, **options: object) -> torch.Tensor:
        tried.append(sizes[0])
        if len(tried) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return torch.zeros(*sizes, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(host_state.torch, "empty", empty)
    with pytest.raises(RuntimeError, match="can't allocate"):
        move_to_host(live)
    monkeypatch.undo()
    assert same(values(live), before) and storages(live) == held and not live.away


def test_what_holds_nothing_is_freed_without_a_copy(live: Trained) -> None:
    shapes = [tensor.shape for tensor in state_tensors(live)]
    discard(live)
    assert sum(storages(live).values()) <= 4 * STEPS and not live.away
    assert [tensor.shape for tensor in state_tensors(live)] == shapes
