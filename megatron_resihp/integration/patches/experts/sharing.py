# SPDX-License-Identifier: Apache-2.0
"""Experts that replicas share, in Megatron's buffers and optimizers. May import torch.

Where replicas share experts, Megatron reduces the experts' gradients in groups of their own, from buffers of their own,
and has an optimizer of their own for them. Where no replicas share any, it doesn't. A job whose replicas share experts
keeps all that also under plans in which each replica has all of them: so its optimizers have the same parameter groups
under any plan, and its checkpoints say the same.
"""

from typing import Any

import torch

from megatron_resihp.integration.state.parameter_slices import EXPERT

REDUCED_WITH_ALL = "allreduce"
"""Megatron's mark of parameters that all replicas hold."""


def keep_apart(module: torch.nn.Module) -> None:
    """Mark a chunk's experts before it gets gradients."""
    for name, parameter in module.named_parameters():
        if EXPERT.search(name):
            setattr(parameter, REDUCED_WITH_ALL, False)


def steps_experts(part: Any) -> bool:
    """Whether an optimizer, of a chained one's parts, is the experts' own."""
    return any(group.get("is_expert_parallel", False) for group in part.optimizer.param_groups)
