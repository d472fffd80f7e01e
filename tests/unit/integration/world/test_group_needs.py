# SPDX-License-Identifier: Apache-2.0
"""What Megatron wants of torch when it makes its groups, told without making them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.constants import default_pg_timeout
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_resihp.executor.gloo.groups_ahead import WorldGroup
from megatron_resihp.integration.world.group_needs import groups_wanted

WORLD = 8


@pytest.mark.parametrize("rank", [0, 3, 7])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "order": "tp-pp-dp", "create_gloo_process_groups": False},
        {"pipeline_model_parallel_size": 4, "distributed_timeout_minutes": 7},
    ],
    ids=["data", "all", "another order", "another timeout"],
)
def test_the_groups_that_are_really_made(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], rank: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    made = []
    original = dist.new_group

    def new_group(ranks: list[int], timeout: timedelta | None, backend: str | None = None, **options: Any) -> Any:
        if rank in ranks:
            made.append((WorldGroup(tuple(sorted(ranks)), timeout or default_pg_timeout), backend))
        return original(ranks, backend="fake")

    monkeypatch.setattr(dist, "new_group", new_group)
    try:
        parallel_state.initialize_model_parallel(**sizes)
        before = dict(vars(parallel_state))
        assert groups_wanted(rank, WORLD, (), sizes) == made
        assert vars(parallel_state) == before, "the groups in use stay as they are"
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    assert made
