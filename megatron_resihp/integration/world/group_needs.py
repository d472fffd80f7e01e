# SPDX-License-Identifier: Apache-2.0
"""Which process groups a worker is in under a plan that is to come, found out beside the training that goes on.

Of Megatron's groups Megatron is asked: its initialisation is rehearsed in a copy of its module, whose torch makes no
groups but notes which are wanted. Nothing of the plan in force is touched. May import megatron and this package.
"""

import importlib.util
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed.constants import default_pg_timeout

from megatron_resihp.executor.gloo.groups_ahead import GroupNeeds, WorldGroup
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.world.heterogeneous import Heterogeneous
from megatron_resihp.integration.world.heterogeneous_groups import ranks_of_stage
from megatron_resihp.integration.world.world import order_of, side_groups_of, timeout_of, view_of
from megatron_resihp.plan import ParallelPlan

GLOO = "gloo"
REHEARSAL = "megatron.core.parallel_state_rehearsal"


def needs_of(runtime: Runtime, plan: ParallelPlan) -> GroupNeeds:
    """The groups of gloo's that this worker will make for a plan. Called from any thread."""
    heterogeneous = view_of(runtime, plan)
    side_groups: list[tuple[str, tuple[int, ...]]] = []

    def note(name: str, workers: Sequence[int]) -> Any:
        side_groups.append((name, tuple(workers)))

    side_groups_of(runtime, plan, heterogeneous, note)
    if plan.replica_of(runtime.worker) is None:
        return GroupNeeds(tuple(side_groups))
    order = order_of(runtime, plan, heterogeneous)
    rank = order.index(runtime.worker)
    wanted = _of_stage(runtime, heterogeneous) if heterogeneous is not None else _of_uniform(runtime, rank, len(order))
    return GroupNeeds(tuple(side_groups), rank, tuple(wanted))


def _of_stage(runtime: Runtime, heterogeneous: Heterogeneous) -> list[WorldGroup]:
    own, peers = ranks_of_stage(heterogeneous)
    world, stage = tuple(range(len(heterogeneous.rank_order))), WorldGroup(tuple(sorted(peers)), default_pg_timeout)
    if runtime.args.distributed_backend == GLOO:
        return [WorldGroup(world, timeout_of(runtime.args)), WorldGroup((own,), default_pg_timeout), stage]
    return [WorldGroup(world, default_pg_timeout), stage]  # groups beside NCCL's, for host tensors


def _of_uniform(runtime: Runtime, rank: int, size: int) -> list[WorldGroup]:
    assert runtime.build_groups is not None
    positional, options = runtime.build_groups.args, runtime.build_groups.keywords
    own = runtime.args.distributed_backend
    world = WorldGroup(tuple(range(size)), timeout_of(runtime.args))
    wanted = [(world, own), *groups_wanted(rank, size, positional, options)]
    return [group for group, backend in wanted if (backend or own) == GLOO]


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
