# SPDX-License-Identifier: Apache-2.0
"""What old and new training objects take together, and gradients that make room for the new ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.integration.state.footprint import (
    bring_gradients_back,
    bytes_of,
    footprint_of,
    free_gradients,
    storages,
)
from megatron_resihp.integration.step.step import take_step

NUMBERS = 100
BYTES = 4 * NUMBERS


class Buffer:
    """As Megatron's: gradients of all parameters in one piece of memory."""

    def __init__(self) -> None:
        self.param_data, self.grad_data, self.grad_data_size = None, torch.ones(NUMBERS), 0


class Chunk:
    """As Megatron's DDP."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(NUMBERS, 1, bias=False)
        self.module.weight.main_grad = (buffer := Buffer()).grad_data.view(1, NUMBERS)  # type: ignore[assignment]
        self.buffers, self.expert_parallel_buffers = [buffer], list[Buffer]()

    def offload_grad_buffers(self) -> None:
        for buffer in self.buffers:
            if buffer.grad_data.untyped_storage().nbytes():
                buffer.grad_data_size = NUMBERS
                buffer.grad_data.untyped_storage().resize_(0)

    def restore_grad_buffers(self) -> None:
        for buffer in self.buffers:
            buffer.grad_data.untyped_storage().resize_(BYTES)
            buffer.grad_data.zero_()
            buffer.grad_data_size = 0


def trained() -> Any:
    chunk = Chunk()
    parameter = chunk.module.weight
    parameter.grad = torch.ones_like(parameter)
    inner = torch.optim.Adam([parameter])
    inner.step()
    part = SimpleNamespace(optimizer=inner, is_stub_optimizer=False, zero_grad=inner.zero_grad)
    return SimpleNamespace(model=[chunk], optimizer=part)


@pytest.fixture
def runtime() -> Any:
    return SimpleNamespace(trained=trained(), lacks_gradients=False)


def test_gradients_make_room(runtime: Any) -> None:
    whole = bytes_of(runtime.trained)
    assert 4 * BYTES <= whole < 4 * BYTES + 16  # the parameters, their gradients, two moments, and a count of steps
    before = runtime.trained.model[0].module.weight.detach().clone()
    for _ in range(2):  # a rebuild may be begun again
        free_gradients(runtime)
        assert sum(storages(runtime.trained).values()) == whole - BYTES
        assert bytes_of(runtime.trained) == whole
    assert torch.equal(runtime.trained.model[0].module.weight, before)


def test_objects_that_go_on_being_used_have_gradients_again(runtime: Any) -> None:
    """A standby's, after a rebuild in which it would have worked was given up."""
    whole = bytes_of(runtime.trained)
    free_gradients(runtime)
    bring_gradients_back(runtime)
    assert sum(storages(runtime.trained).values()) == whole and not runtime.lacks_gradients
    assert torch.equal(runtime.trained.model[0].module.weight.main_grad, torch.zeros(1, NUMBERS))


def test_gradients_that_are_there_are_left_alone(runtime: Any) -> None:
    bring_gradients_back(runtime)
    assert torch.equal(runtime.trained.model[0].buffers[0].grad_data, torch.ones(NUMBERS))


def test_no_step_is_taken_without_gradients(runtime: Any) -> None:
    free_gradients(runtime)
    with pytest.raises(RuntimeError, match="whose gradients were freed"):
        take_step(runtime, SimpleNamespace(skipped=False))  # type: ignore[arg-type]


def test_what_is_taken_over_counts_once(runtime: Any) -> None:
    before, new = bytes_of(runtime.trained), trained()
    new.optimizer.optimizer.state = runtime.trained.optimizer.optimizer.state
    free_gradients(runtime)
    found = footprint_of(before, storages(runtime.trained), storages(new))
    assert found.before == before and found.new == 2 * BYTES  # parameters and gradients; moments are the old ones
    assert found.most == before - BYTES + 2 * BYTES
