# SPDX-License-Identifier: Apache-2.0
"""Patches: the gathering of parameters in the next forward pass (`--overlap-param-gather`).

Each module's first forward pass after a step waits for its bucket's parameters, and has those of the next bucket sent.
A worker counts as STEPPED meanwhile: the truth is the masters, and what was gathered when an epoch breaks is dropped
(`step.optimizer_shards.publish_parameters` gathers anew). Replaces finish_param_sync of Megatron's bucket groups, and
how its DDP turns these hooks on and off. May import megatron and this package.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_resihp.integration.runtime import Runtime


def wrap_finish_param_sync(runtime: Runtime, original: Callable[..., None]) -> Callable[..., None]:
    """The wait for a bucket's parameters is no work of the op that needs them."""
    probes = runtime.probes

    @functools.wraps(original)
    def finish_param_sync(self: Any, *positional: Any, **options: Any) -> None:
        if self.param_gather_dispatched and self.param_gather_handle is None:
            return  # they are there
        in_op = probes.ops.in_op
        since = probes.mark() if in_op else 0.0
        original(self, *positional, **options)
        if in_op:
            probes.ops.note_parameters(since)
        runtime.reach("gather")

    return finish_param_sync


def wrap_enable_forward_pre_hook(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron turns hooks on after the first step that train() has taken, and after each evaluation.

    train() is entered again after a recovery. If its first step is skipped then, an evaluation finds no hooks, which
    never happens to a job without failures.
    """

    @functools.wraps(original)
    def enable_forward_pre_hook(self: Any) -> None:
        if not self.remove_forward_pre_hook_handles:
            original(self)

    return enable_forward_pre_hook


def wrap_disable_forward_pre_hook(original: Callable[..., None]) -> Callable[..., None]:
    """Without hooks there is nothing to take off, and no parameter that the others don't have too."""

    @functools.wraps(original)
    def disable_forward_pre_hook(self: Any, param_sync: bool = True) -> None:
        if self.remove_forward_pre_hook_handles:
            original(self, param_sync)

    return disable_forward_pre_hook
