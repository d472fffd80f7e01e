# SPDX-License-Identifier: Apache-2.0
"""What is trained: Megatron's objects that hold this worker's shard. May import torch."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Trained:
    """The objects that hold this worker's shard.

    Attributes:
        model, optimizer, scheduler: Megatron's.
        lacks_gradients: whether the buffers for gradients are freed.
        away: tensors whose state is in host memory, each with what it was of the device's, which is freed meanwhile.
        elsewhere: settings of parameter groups that other workers' optimizers have and this one lacks: a joining worker
            builds one before it knows of all kinds of parameters.
    """

    model: list[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    lacks_gradients: bool = False
    away: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    elsewhere: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that a chained optimizer, of chained ones perhaps, is made of; a plain one is its own part."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [part for each in chained for part in parts_of(each)]


def takes_matrices(part: Any) -> bool:
    """Whether an optimizer steps each parameter as a matrix, as Muon does, and not number by number. It counts no
    steps."""
    return hasattr(part.optimizer, "scaled_orthogonalize_fn")
