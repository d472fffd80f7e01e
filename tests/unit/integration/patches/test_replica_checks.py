# SPDX-License-Identifier: Apache-2.0
"""Where Megatron compares replicas: no replica asks more often than another, and any plan's replicas are compared."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_resihp.integration.modes.heterogeneous import HeterogeneousMode
from megatron_resihp.integration.patches.replica_checks import wrap_check_param_hashes, wrap_run_realtime_tests
from megatron_resihp.plan import ParallelPlan, Replica, deal


@pytest.mark.parametrize(
    ("shares", "evaluated", "asks"), [([4, 4], 8, True), ([3, 3, 2], 9, False), ([4, 4, 4, 4], 6, False)]
)
def test_only_replicas_with_as_many_micro_batches_ask_each_other(
    shares: Sequence[int], evaluated: int, asks: bool
) -> None:
    replicas = tuple(Replica(((number,),), hand) for number, hand in enumerate(deal(shares)))
    runtime: Any = SimpleNamespace(
        job=SimpleNamespace(args=SimpleNamespace(eval_global_batch_size=evaluated, eval_micro_batch_size=1)),
        view=SimpleNamespace(plan=ParallelPlan(replicas)),
    )
    asked: list[Any] = []
    wrap_run_realtime_tests(runtime, asked.append)("attention")
    assert asked == (["attention"] if asks else [])


@pytest.mark.parametrize(("others", "agree"), [({"0/0": "a", "1/0": "b"}, True), ({"1/0": "b", "0/0": "c"}, False)])
def test_holders_of_a_slice_are_compared(monkeypatch: pytest.MonkeyPatch, others: dict[str, str], agree: bool) -> None:
    def gather(found: list[Any], own: Any) -> None:
        found[:] = [own, others]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    mode: Any = object.__new__(HeterogeneousMode)
    mode.view = SimpleNamespace(rank_order=(3, 5))
    mode.state = SimpleNamespace(digests=lambda live: {"0/0": "a"})
    mode._runtime = SimpleNamespace(held=SimpleNamespace(live=None))

    def megatrons(model: Any, cross_check: bool) -> bool:
        pytest.fail("its groups have one member each")

    runtime: Any = SimpleNamespace(mode=mode)
    check = wrap_check_param_hashes(runtime, megatrons)
    assert check([], cross_check=True) is agree
