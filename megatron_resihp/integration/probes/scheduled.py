# SPDX-License-Identifier: Apache-2.0
"""What flags schedule for an iteration to come: faults, slowdowns and plans. May import `config`, `control`, `plan`."""

from megatron_resihp.config import Injection, ResihpConfig, Slowdown
from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.events.injections import Drill
from megatron_resihp.integration.probes.fault_injection import Injections, ScheduledSlowdowns
from megatron_resihp.integration.progress import Progress
from megatron_resihp.plan.files import read_plan
from megatron_resihp.protocol.messages import PlanRequest, SlowdownRequest


class Scheduled:
    """What is scheduled for this worker.

    Attributes:
        injections: faults.
        slowdowns: slowdowns.
        plans: those still to be asked for, each with its JSON: its file may be gone by then.
    """

    def __init__(self, config: ResihpConfig, control: WorkerControl, progress: Progress) -> None:
        self._control, self._progress = control, progress
        self.injections = Injections(config.injections(), control.worker, self._announce_injection)
        self.slowdowns = ScheduledSlowdowns(config.slowdowns(), self._ask_for_slowdown)
        self.plans = [(plan, read_plan(plan.path)) for plan in config.plans()]

    def ask_for_plans(self, iteration: int, reports: bool) -> None:
        """Ask for the plans that are due when an iteration begins, once; the worker that reports it asks for all.

        Standbys call it too, or they would ask for plans of long ago when they report some day.
        """
        while self.plans and self.plans[0][0].iteration <= iteration:
            due, plan = self.plans.pop(0)
            if reports:
                self._control.tell(PlanRequest(plan, f"--resihp-plan {due.path}", patient=True))

    def drop_plans_until(self, iteration: int) -> None:
        """Others have asked for those of this iteration and of earlier ones."""
        self.plans = [(each, plan) for each, plan in self.plans if each.iteration > iteration]

    def _announce_injection(self, injection: Injection) -> None:
        self._control.event(Drill(
            action=injection.action, target=injection.worker, iteration=self._progress.iteration, point=injection.point,
        ))  # fmt: skip

    def _ask_for_slowdown(self, index: int, slowdown: Slowdown) -> None:
        self._control.tell(SlowdownRequest(slowdown.workers, slowdown.factor, slowdown.iteration, index))
