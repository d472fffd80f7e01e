# SPDX-License-Identifier: Apache-2.0
"""Megatron's table of groups under a heterogeneous plan, filled with what torch is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.constants import default_pg_timeout
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_resihp.executor.gloo.groups_ahead import WorldGroup
from megatron_resihp.integration.modes.heterogeneous import HeterogeneousMode
from megatron_resihp.integration.world.heterogeneous import HeterogeneousView
from megatron_resihp.integration.world.heterogeneous_groups import MegatronGroups
from megatron_resihp.plan import Chunk, ParallelPlan, Replica

PLAN = ParallelPlan((Replica(((4, 6),), (0,), (Chunk(0, 0, 6),)), Replica(((5,),), (1,), (Chunk(0, 0, 6),))))
OF_HOST = {
    "_DATA_PARALLEL_GROUP_GLOO",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO",
}


class Made(NamedTuple):
    ranks: tuple[int, ...]
    backend: str | None


@pytest.fixture(autouse=True)
def table() -> Iterator[dict[str, Any]]:
    """Megatron's; after the test it is what it was before."""
    before = dict(vars(parallel_state))
    yield vars(parallel_state)
    vars(parallel_state).update(before)


def megatrons_own(with_gloo: bool) -> MegatronGroups:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        with pytest.MonkeyPatch.context() as making:
            making.setattr(dist, "new_group", lambda ranks, **_: Made(tuple(ranks), None))
            parallel_state.initialize_model_parallel(create_gloo_process_groups=with_gloo)
    finally:
        dist.destroy_process_group()
    parallel_state._GLOBAL_MEMORY_BUFFER = None
    return MegatronGroups()


@pytest.mark.parametrize("with_gloo", [True, False])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_megatrons_groups_for_host_tensors_are_gloos(
    monkeypatch: pytest.MonkeyPatch, table: dict[str, Any], backend: str, with_gloo: bool
) -> None:
    """Where NCCL is the world's, which carries none. All workers make equally many groups, since torch counts them."""
    groups = megatrons_own(with_gloo)
    made: list[Made] = []

    def new_group(ranks: list[int], backend: str | None = None, use_local_synchronization: bool = False) -> Made:
        assert use_local_synchronization
        made.append(Made(tuple(ranks), backend))
        return made[-1]

    monkeypatch.setattr(dist, "new_group", new_group)
    view = HeterogeneousView(PLAN, 4, None)
    groups.replace(view, backend)
    own, *others = (view.rank_order.index(worker) for worker in (4, 6))
    beside = with_gloo and backend == "nccl"
    alone, stage = Made((own,), None), Made((own, *others), None)
    assert made == [alone, stage, *([Made((own,), "gloo")] if beside else [])]
    assert {name for name in OF_HOST if table[name]} == (OF_HOST if with_gloo else set())
    assert all(table[name] == (made[-1] if beside else alone) for name in OF_HOST if with_gloo)
    assert (table["_DATA_PARALLEL_GROUP"], table["_TENSOR_MODEL_PARALLEL_GROUP"]) == (alone, stage)

    mode: Any = object.__new__(HeterogeneousMode)
    args = SimpleNamespace(distributed_backend=backend, distributed_timeout_minutes=7)
    mode.view = view
    mode._runtime = SimpleNamespace(job=SimpleNamespace(args=args), setup=SimpleNamespace(groups=groups))
    singleton = WorldGroup((own,), default_pg_timeout)
    assert mode.wanted_groups().count(singleton) == int(beside or backend == "gloo"), "they can be made in advance"
