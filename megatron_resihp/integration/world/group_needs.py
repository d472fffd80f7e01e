# SPDX-License-Identifier: Apache-2.0
"""Which process groups a worker is in under a plan that is to come, found out beside the training that goes on.

Megatron itself tells its groups: its initialisation is rehearsed in a copy of its module, whose torch makes no groups
but notes which are wanted. Nothing of the plan in force is touched. May import megatron and this package.
"""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed.constants import default_pg_timeout

from megatron_resihp.executor.gloo.groups_ahead import WorldGroup

GLOO = "gloo"
REHEARSAL = "megatron.core.parallel_state_rehearsal"


def timeout_of(args: Any) -> timedelta:
    """How long operations in torch's world may wait."""
    return timedelta(minutes=args.distributed_timeout_minutes)


def world_group(args: Any, size: int) -> WorldGroup:
    """Torch's world of a plan."""
    return WorldGroup(tuple(range(size)), timeout_of(args))


def of_gloo(wanted: Iterable[tuple[WorldGroup, str | None]], backend: str) -> list[WorldGroup]:
    """The groups that gloo runs. `backend`: of groups that ask for none."""
    return [group for group, own in wanted if (own or backend) == GLOO]


def groups_wanted(
    rank: int, size: int, positional: Sequence[Any], options: dict[str, Any]
) -> list[tuple[WorldGroup, str | None]]:
    """The groups with this rank in them that Megatron's initialize_model_parallel makes, in its order.

    Args:
        rank, size: of the world.
        positional, options: what it is called with.

    Returns:
        each, and the backend if it asks for one.
    """
    found: list[tuple[WorldGroup, str | None]] = []

    def new_group(
        ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None, **others: Any
    ) -> object:
        if rank in ranks:
            found.append((WorldGroup(tuple(sorted(ranks)), timeout or default_pg_timeout), backend))
        return object()

    module = _copy_of(parallel_state)
    distributed = _Instead(
        torch.distributed,
        is_initialized=lambda: True,
        get_rank=lambda group=None: rank,
        get_world_size=lambda group=None: size,
        new_group=new_group,
    )
    vars(module)["torch"] = _Instead(torch, distributed=distributed)
    module.initialize_model_parallel(*positional, **options)
    return found


def _copy_of(module: ModuleType) -> ModuleType:
    """Another module of the same code: what it remembers is its own."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(REHEARSAL, module.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


class _Instead:
    """A module with some names replaced."""

    def __init__(self, module: ModuleType, **replaced: Callable[..., Any] | Any) -> None:
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
