# SPDX-License-Identifier: Apache-2.0
"""Patch: experts that replicas share, in Megatron's buffers and optimizers. Wraps MoELayer's start. May import torch
and this package.

Where replicas share experts, Megatron reduces the experts' gradients in groups of their own, from buffers of their own,
and has an optimizer of their own for them. Where no replicas share any, it doesn't. A job whose replicas share experts
keeps all that also under plans in which each replica has all of them: so its optimizers have the same parameter groups
under any plan, and its checkpoints say the same.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_resihp.integration.runtime import Runtime

REDUCED_WITH_ALL = "allreduce"
"""Megatron's mark of parameters that all replicas hold."""


def wrap_moe_layer(runtime: Runtime, original: Callable[..., None]) -> Callable[..., None]:
    """A layer whose experts are marked as it is built: buffers are laid out before Megatron wraps the chunk."""

    @functools.wraps(original)
    def __init__(self: Any, *positional: Any, **options: Any) -> None:
        original(self, *positional, **options)
        if runtime.job.own.shares_experts:
            for parameter in self.experts.parameters():
                setattr(parameter, REDUCED_WITH_ALL, False)

    return __init__


def steps_experts(part: Any) -> bool:
    """Whether an optimizer, of a chained one's parts, is the experts' own."""
    return any(group.get("is_expert_parallel", False) for group in part.optimizer.param_groups)
