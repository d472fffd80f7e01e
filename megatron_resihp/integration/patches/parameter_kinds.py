# SPDX-License-Identifier: Apache-2.0
"""Patch: which kinds of parameters the whole model has, asked of all workers once instead of in every epoch.

Replaces core.optimizer._get_param_groups. An optimizer has a group for each kind that any rank has (another learning
rate, no weight decay, an expert's), also where its own rank has no such parameter, so Megatron gathers them over the
world whenever it builds one. The model, and so its kinds, stay the same in all layouts; on eight CPU workers asking
again was a sixth of the processor time of a change. May import megatron and this package.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.trained import ParameterKinds


def wrap_get_param_groups(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement: it is answered from memory where all workers of the plan in force remember."""

    @functools.wraps(original)
    def get_param_groups(*positional: Any, **options: Any) -> Any:
        with _gathering(runtime):
            return original(*positional, **options)

    return get_param_groups


@contextmanager
def _gathering(runtime: Runtime) -> Iterator[None]:
    """Let Megatron's gathering go through `runtime.parameter_kinds`."""
    original = torch.distributed.all_gather_object
    working = frozenset(runtime.current_plan.working)

    def all_gather_object(object_list: list[Any], own: Any, group: Any = None) -> None:
        kinds, starting = runtime.parameter_kinds, runtime.trained is None
        if kinds is not None and not starting and working <= kinds.workers:
            if not set(own) <= set(kinds.keys):
                raise RuntimeError("the model has parameters of a kind that it did not have when the job began")
            object_list[:] = [kinds.keys] * len(object_list)
            return
        original(object_list, own, group)
        if starting and not runtime.joining:
            before = () if kinds is None else kinds.keys
            found = dict.fromkeys([*before, *(key for keys in object_list for key in keys)])
            runtime.parameter_kinds = ParameterKinds(tuple(found), working)

    torch.distributed.all_gather_object = all_gather_object
    try:
        yield
    finally:
        torch.distributed.all_gather_object = original
