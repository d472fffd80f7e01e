"""The thread beside the coordinator that has plans made."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.control import strategist
from megatron_resihp.control.strategist import Strategist
from megatron_resihp.plan import Chunk, ParallelPlan, Replica

PLAN = ParallelPlan((Replica(((0,),), (0, 1)), Replica(((1,),), (2, 3))))
NEXT = ParallelPlan((Replica(((0,), (1,)), (0, 1, 2, 3), (Chunk(0, 0, 1), Chunk(1, 1, 4))),))


def verdict(worker: int) -> dict[str, Any]:
    return {
        "event": "verdict", "kind": "compute", "change": "onset", "workers": [worker], "speed": 0.5, "since": 2,
        "iteration": 4,
    }  # fmt: skip


def test_verdicts_that_come_together_lead_to_one_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes while a plan is made for the first."""
    orders: queue.Queue[dict[str, Any]] = queue.Queue()
    asked: list[dict[str, float]] = []

    class Planner:
        def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
            asked.append(request["speeds"])
            if len(asked) == 1:
                desk.note(verdict(1))
            return {"plan": NEXT.to_dict(), "iteration_s": 0.5, "current_s": 1.0, "moving_s": 0.0}

        def rehearse(self, request: Mapping[str, Any]) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(strategist, "PlannerProcess", Planner)
    desk = Strategist(tmp_path, 2, 2, lambda event: None, orders.put)
    desk.note({"event": "job", "train_iters": 100, "act": "act", "strategy": "joint", "seconds_between_changes": 0.0})
    desk.note({"event": "epoch_started", "epoch": 0, "plan": PLAN.to_dict()})
    desk.note({"event": "iteration", "iteration": 3, "duration_s": 1.0})
    desk.note(verdict(0))
    order = orders.get(timeout=30.0)
    desk.close(30.0)
    assert asked == [{"0": 0.5, "1": 1.0}, {"0": 0.5, "1": 0.5}]
    assert order["plan"] == NEXT.to_dict() and "worker 1 at 0.50" in order["why"]
    assert orders.empty()
