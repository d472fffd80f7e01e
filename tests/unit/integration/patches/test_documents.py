# SPDX-License-Identifier: Apache-2.0
"""How many tokens in packed documents Megatron takes an iteration to have had."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training import training

from megatron_resihp.integration.ops import program_schedule
from megatron_resihp.integration.ops.program_schedule import MegatronWork, ScheduleCall
from megatron_resihp.integration.probes.probe_clock import HostClock
from megatron_resihp.integration.probes.probes import Probes
from megatron_resihp.plan import PlannedOp

Lengths = list[tuple[int, ...]]
"""Of the documents of each micro-batch."""
MICRO_BATCHES: Lengths = [(3, 5), (8,), (1, 1, 6)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No documents seen yet, on a machine without a device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(training, "_seqlen_stats_in_iteration", None)
    monkeypatch.setattr(training, "_seqlen_stats_active", False)
    return iter([None])


def work(monkeypatch: pytest.MonkeyPatch, own_chunks: tuple[int, ...]) -> MegatronWork:
    """Of a worker with these chunks of four, whose forward steps see their micro-batch's documents."""

    def forward_step(function: Any, iterator: Any, model: Any, total: int, *_: Any, **options: Any) -> Any:
        bounds = torch.tensor((0, *MICRO_BATCHES[options["current_microbatch"]])).cumsum(0)
        training.update_seqlen_stats_from_cu_seqlens(bounds)
        return torch.zeros(1), 0

    monkeypatch.setattr(program_schedule.schedules, "forward_step", forward_step)
    monkeypatch.setattr(program_schedule, "get_model_config", lambda model: None)
    view: Any = SimpleNamespace(own_chunks=own_chunks, chunks=range(4))
    steps: Any = [SimpleNamespace(op=PlannedOp("F", chunk, m)) for m in range(3) for chunk in own_chunks]
    probes = Probes(0, HostClock, lambda sheet: None)
    call = ScheduleCall(None, None, [None] * len(own_chunks), 3)
    return MegatronWork(view, steps, call, probes, lambda: None)


@pytest.mark.parametrize(("chunks", "expected"), [((0, 3), [24.0, 9 + 25 + 64 + 38]), ((1, 2), None)])
def test_each_document_counts_once(
    monkeypatch: pytest.MonkeyPatch, chunks: tuple[int, ...], expected: list[float] | None
) -> None:
    found = work(monkeypatch, chunks)
    training.update_seqlen_stats_from_cu_seqlens(torch.tensor([0, 100]))  # of an evaluation before
    with torch.no_grad():
        for micro_batch in range(3):
            for chunk in chunks:
                found.forward(chunk, micro_batch, None)
    assert (None if found.documents is None else found.documents.tolist()) == expected
