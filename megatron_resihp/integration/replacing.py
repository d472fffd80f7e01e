# SPDX-License-Identifier: Apache-2.0
"""How new objects take the place of old ones that Megatron's pretrain() holds. May import torch.

pretrain() and train() keep the model, the optimizer and the scheduler in local variables, which no code outside can
bind to anything else. So the old object stays and gets the new one's class and state. The alternative is to end
pretrain() and enter it again, which repeats its whole set-up.
"""

from typing import Any

import torch


def become(old: Any, new: Any) -> None:
    """Let every reference to `old` see the state and behaviour of `new`."""
    old.__class__ = new.__class__
    old.__dict__ = new.__dict__


def take_apart(model: list[torch.nn.Module]) -> None:
    """Empty the modules of a model that is out of use: its reference cycles would keep buffers and groups until some
    later garbage collection."""
    for module in [module for chunk in model for module in chunk.modules()]:
        module.__dict__.clear()
    # NCCL takes its buffers from the device, not from what torch keeps for later.
    torch.cuda.empty_cache()
