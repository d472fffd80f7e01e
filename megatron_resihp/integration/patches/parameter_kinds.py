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
from dataclasses import dataclass
from typing import Any

import torch

from megatron_resihp.integration.runtime import Runtime


def wrap_get_param_groups(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement: it is answered from memory where all workers of the plan in force remember."""
    known = KnownKinds()

    @functools.wraps(original)
    def get_param_groups(*positional: Any, **options: Any) -> Any:
        with _gathering(runtime, known):
            return original(*positional, **options)

    return get_param_groups


@dataclass
class KnownKinds:
    """The kinds of parameters that the whole model has, once the job's first workers have told each other.

    Attributes:
        keys: of Megatron's parameter groups.
        workers: those that know them: those that the job began with.
    """

    keys: tuple[Any, ...] = ()
    workers: frozenset[int] = frozenset()


@contextmanager
def _gathering(runtime: Runtime, known: KnownKinds) -> Iterator[None]:
    """Let Megatron's gathering be answered from memory."""
    original = torch.distributed.all_gather_object
    working = frozenset(runtime.view.plan.working)

    def all_gather_object(object_list: list[Any], own: Any, group: Any = None) -> None:
        starting = not runtime.held.is_built
        if not starting and working <= known.workers:
            if not set(own) <= set(known.keys):
                raise RuntimeError("the model has parameters of a kind that it did not have when the job began")
            object_list[:] = [known.keys] * len(object_list)
            return
        original(object_list, own, group)
        if starting and not runtime.joining:
            found = dict.fromkeys([*known.keys, *(key for keys in object_list for key in keys)])
            known.keys, known.workers = tuple(found), working

    torch.distributed.all_gather_object = all_gather_object
    try:
        yield
    finally:
        torch.distributed.all_gather_object = original
