# SPDX-License-Identifier: Apache-2.0
"""When a running job asks for the plans of --resihp-plan."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_resihp.config import ScheduledPlan
from megatron_resihp.integration.probes.scheduled import Scheduled
from megatron_resihp.integration.progress import Progress
from megatron_resihp.protocol.messages import PlanRequest


class Worker:
    """A worker; `asked` are the plans that it has asked for."""

    def __init__(self, tmp_path: Path, *iterations: int) -> None:
        self.asked: list[Any] = []
        for each in iterations:
            (tmp_path / f"{each}.json").write_text(json.dumps({"replicas": each}))
        plans = tuple(ScheduledPlan(tmp_path / f"{each}.json", each) for each in iterations)
        config: Any = SimpleNamespace(injections=lambda: (), slowdowns=lambda: (), plans=lambda: plans)
        control: Any = SimpleNamespace(worker=0, tell=lambda request: self.asked.append((type(request), request.plan)))
        self._scheduled = Scheduled(config, control, Progress())

    def begin(self, iteration: int, reports: bool) -> None:
        self._scheduled.ask_for_plans(iteration, reports)


def test_who_reports_asks_when_the_iteration_begins(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 2, 4)
    for iteration in (1, 2, 2, 3):
        worker.begin(iteration, reports=True)
    assert worker.asked == [(PlanRequest, {"replicas": 2})]


def test_a_worker_that_reports_later_asks_for_nothing_of_before(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 2, 4, 6)
    worker.begin(2, reports=False)
    worker.begin(5, reports=False)
    worker.begin(6, reports=True)
    assert worker.asked == [(PlanRequest, {"replicas": 6})]
