# SPDX-License-Identifier: Apache-2.0
"""What Transformer Engine does with groups and memory past torch, and what is done about it. May import megatron."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu


def meet_before_it(args: Any) -> None:
    """Have the tensor-parallel members' communicator made by an operation that a dead peer can't hold up for ever.

    With 8 bits and sequence parallelism, Transformer Engine reduces maxima over that group in C++, which no patch sees.
    On a stage between the first and the last that would be the group's first operation, and so make its communicator.
    """
    if args.fp8 and mpu.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=mpu.get_tensor_model_parallel_group())


def forget_its_gradients() -> None:
    """Free the gradients without contents that it keeps on the device for each shape of a weight."""
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    if base is not None:
        getattr(base, "_dummy_wgrads", {}).clear()
