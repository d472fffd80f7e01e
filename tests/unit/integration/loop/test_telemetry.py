# SPDX-License-Identifier: Apache-2.0
"""What a worker tells of its iterations."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.integration.loop.notes import RecoveryNotes
from megatron_resihp.integration.loop.telemetry import report_iteration
from megatron_resihp.integration.step.expert_loads import LoadCounter


def test_a_clock_that_is_set_makes_no_iteration_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    outcome = SimpleNamespace(epoch=0, means={}, grad_norm=1.0, skipped=False, stop=False)
    runtime: Any = SimpleNamespace(
        progress=SimpleNamespace(iteration=7, outcomes={7: outcome}, counters={7: {"settings": {"scale": {}}}}),
        view=SimpleNamespace(reports=True), control=SimpleNamespace(event_behind=told.append),
        job=SimpleNamespace(args=SimpleNamespace(global_batch_size=4)), recovery=RecoveryNotes(),
        loads=LoadCounter(1, 0, 1),
    )  # fmt: skip
    seconds = {"wall": 5000.0, "monotonic": 100.0}
    monkeypatch.setattr(time, "time", lambda: seconds["wall"])
    monkeypatch.setattr(time, "monotonic", lambda: seconds["monotonic"])
    report_iteration(runtime)
    seconds["wall"] += 3600.0
    seconds["monotonic"] += 2.0
    report_iteration(runtime)
    assert [each.duration_s for each in told] == [None, 2.0]
