# SPDX-License-Identifier: Apache-2.0
"""What a micro-batch says of places in others is a place even if NCCL ends the broadcast without a result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_resihp.integration.probes.patches import wrap_broadcast

MEMBERS, OTHERS = "members", "others"
STALE = 7


@pytest.mark.parametrize(
    ("group", "rank", "dtype", "found"),
    [
        (MEMBERS, 1, torch.int64, 0), (MEMBERS, 1, torch.int32, 0), (MEMBERS, 1, torch.float, STALE),
        (MEMBERS, 0, torch.int64, STALE), (OTHERS, 1, torch.int64, STALE), (None, 1, torch.int64, STALE),
    ],
)  # fmt: skip
def test_what_an_aborted_broadcast_leaves(
    monkeypatch: pytest.MonkeyPatch, group: str | None, rank: int, dtype: torch.dtype, found: int
) -> None:
    """On rank 0, where it comes from, it stays; so do other groups' tensors."""
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    ops = SimpleNamespace(in_op=False, tp_group=MEMBERS)
    runtime: Any = SimpleNamespace(probes=SimpleNamespace(ops=ops))
    tensor = torch.full((3,), STALE, dtype=dtype)
    wrap_broadcast(runtime, lambda tensor, src, group=None: None)(tensor, 0, group=group)
    assert tensor.tolist() == [found] * 3


@pytest.mark.parametrize("options", [{"src": 1}, {"group_src": 0}, {"src": None, "group_src": 0}])
def test_where_it_comes_from_may_be_told_in_other_ways(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    ops = SimpleNamespace(in_op=False, tp_group=MEMBERS)
    runtime: Any = SimpleNamespace(probes=SimpleNamespace(ops=ops))
    tensor = torch.full((3,), STALE)
    wrap_broadcast(runtime, lambda tensor, group=None, **source: None)(tensor, group=MEMBERS, **options)
    assert tensor.tolist() == [STALE] * 3
