# SPDX-License-Identifier: Apache-2.0
"""What a worker takes from one epoch into the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.integration.state.slice_state import sum_slice_gradients
from megatron_resihp.integration.world import world


def test_a_standby_divides_by_the_tokens_of_others_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the head in the epoch before, and counted 7; those who work now count 8."""
    monkeypatch.setattr(world.mpu, "destroy_model_parallel", lambda: None)
    factors: list[float] = []
    runtime: Any = SimpleNamespace(
        tokens=7.0, works=False, buckets=[], communicators=SimpleNamespace(destroy=lambda: None),
        args=SimpleNamespace(calculate_per_token_loss=True),
        trained=SimpleNamespace(model=[SimpleNamespace(scale_gradients=factors.append)]),
    )  # fmt: skip
    world.tear_down(runtime)

    def add_those_of_others(values: torch.Tensor) -> None:
        values += 8.0

    runtime.everybody = SimpleNamespace(sum=add_those_of_others)
    heterogeneous: Any = SimpleNamespace(worker=0, shards={0: ()}, slices=(), contributed=frozenset())
    sum_slice_gradients(runtime, heterogeneous)
    assert factors == [1 / 8]
