# SPDX-License-Identifier: Apache-2.0
"""Training objects with one parameter, as Megatron's are put together. Imports torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron_resihp.integration.trained import Trained

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
    return Trained([chunk], part, None)
