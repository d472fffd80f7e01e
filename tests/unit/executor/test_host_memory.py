# SPDX-License-Identifier: Apache-2.0
"""Host memory between a device and gloo: waited for, and used again."""

from __future__ import annotations

import torch
from late_copies import LateCopies

from megatron_resihp.executor.host_memory import HostMemory, host_memory_of


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
