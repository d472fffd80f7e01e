# SPDX-License-Identifier: Apache-2.0
"""What is done around Transformer Engine, which isn't installed here."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_resihp.integration.world import engine


@pytest.mark.parametrize(("fp8", "members", "meetings"), [("hybrid", 2, 1), ("hybrid", 1, 0), (None, 2, 0)])
def test_members_meet_before_a_reduction_that_no_patch_sees(
    monkeypatch: pytest.MonkeyPatch, fp8: str | None, members: int, meetings: int
) -> None:
    met: list[Any] = []
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_world_size", lambda: members)
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_group", lambda: "members")
    monkeypatch.setattr(dist, "all_reduce", lambda number, group: met.append(group))
    monkeypatch.setattr(engine.torch, "zeros", lambda size, device: torch.ones(size))
    engine.meet_before_it(SimpleNamespace(fp8=fp8))
    assert met == ["members"] * meetings


def test_gradients_that_it_keeps_for_each_shape_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards have other shapes under other plans."""
    engine.forget_its_gradients()
    base = SimpleNamespace(_dummy_wgrads={(4, 4): torch.zeros(4, 4)})
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", base)
    engine.forget_its_gradients()
    assert not base._dummy_wgrads
