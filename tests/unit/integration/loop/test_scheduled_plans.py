# SPDX-License-Identifier: Apache-2.0
"""When a running job asks for the plans of --resihp-plan."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_resihp.config import ScheduledPlan
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.protocol.messages import PlanRequest


class Worker(SimpleNamespace):
    """What of a worker's runtime matters here; `asked` are the plans that it has asked for."""

    def __init__(self, *iterations: int) -> None:
        self.asked: list[Any] = []
        self.control = SimpleNamespace(tell=lambda request: self.asked.append((type(request), request.plan)))
        self.view = SimpleNamespace(reports=False)
        self.plans = [(ScheduledPlan(Path("plan.json"), each), {"replicas": each}) for each in iterations]

    def begin(self, iteration: int, reports: bool) -> None:
        self.view.reports = reports
        Runtime.ask_for_plans(self, iteration)  # type: ignore[arg-type]


def test_who_reports_asks_when_the_iteration_begins() -> None:
    worker = Worker(2, 4)
    for iteration in (1, 2, 2, 3):
        worker.begin(iteration, reports=True)
    assert worker.asked == [(PlanRequest, {"replicas": 2})]


def test_a_worker_that_reports_later_asks_for_nothing_of_before() -> None:
    worker = Worker(2, 4, 6)
    worker.begin(2, reports=False)
    worker.begin(5, reports=False)
    worker.begin(6, reports=True)
    assert worker.asked == [(PlanRequest, {"replicas": 6})]
