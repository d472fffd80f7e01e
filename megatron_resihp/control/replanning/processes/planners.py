# SPDX-License-Identifier: Apache-2.0
"""Plans made by strategies, in two processes: one for recoveries, and one at low priority for all that can wait.

Planners know slots only: that a worker was started anew is nothing to them. So workers' ids become slots in requests,
and slots ids in answers. May import `plan`, `planner`, `protocol`, `events` and `control.replanning`'s other modules.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from megatron_resihp.config import OBSERVE, UNIFORM
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.health import Speeds
from megatron_resihp.control.replanning.job_facts import JobFacts
from megatron_resihp.control.replanning.precomputed import PrecomputedPlans
from megatron_resihp.control.replanning.processes.planner_process import PlannerProcess
from megatron_resihp.control.replanning.recovery.inventory import Survivors
from megatron_resihp.control.replanning.recovery.next_plan import Heard
from megatron_resihp.events.event import Event
from megatron_resihp.plan import Chunk, ParallelPlan
from megatron_resihp.plan.slots import links_of_slots, renamed, slot_of, workers_in_slots
from megatron_resihp.planner import JobShape, NoPlanError, initial_plan
from megatron_resihp.protocol.planning import KnownJob, NoPlan, PlannerAnswer, PlannerRequest

BY_CHOICE_S: Final = 600.0
REHEARSED_SPEED: Final = 0.7


class Planners:
    """The planners of one job.

    Args:
        cost_model: where the detector keeps what it learns of costs.
        size: of the job.
        speeds: of its workers and links, kept up to date by the caller.
    """

    def __init__(self, cost_model: Path, size: JobSize, speeds: Speeds) -> None:
        self._cost_model = cost_model
        self._workers = size.workers
        self._sizes = size.slots, size.workers_per_node
        self._speeds = speeds
        self._precomputed = PrecomputedPlans(*self._sizes)
        self._in_recoveries, self._by_choice = PlannerProcess(), PlannerProcess(low_priority=True)

    def close(self) -> None:
        """End the processes."""
        self._in_recoveries.close()
        self._by_choice.close()

    def note(self, event: Event) -> None:
        """What an event means for the plans that were made ahead."""
        self._precomputed.note(event, _written_at(self._cost_model))

    def start(self) -> None:
        """Begin to load what recoveries need."""
        self._in_recoveries.start()

    def for_survivors(self, strategy: str, survivors: Survivors, running: ParallelPlan, timeout_s: float) -> Heard:
        """The next plan after a loss, which may have been made ahead; as `next_plan.AskAboutSurvivors`."""
        alive = survivors.held.keys()
        request = self._request(strategy, (survivors.known, survivors.own), running, alive)
        known = self._precomputed.answer(request)
        began = time.monotonic()
        answer = self._in_recoveries.ask(request, timeout_s) if known is None else known
        waited_s = time.monotonic() - began
        return Heard(self._named(answer, alive), made_ahead=known is not None, waited_s=waited_s)

    def by_choice(self, strategy: str, facts: JobFacts, plan: ParallelPlan) -> PlannerAnswer:
        """A better plan for the members of this one, as fast as they are now."""
        request = self._request(strategy, facts.known(), plan, plan.members)
        return self._named(self._by_choice.ask(request, BY_CHOICE_S), plan.members)

    def plan_ahead(self, facts: JobFacts) -> PlannerAnswer | None:
        """Make a plan for the next loss that is likely; None: there is none to plan for. Where the planner fails, that
        was the last one until the next epoch.
        """
        lost = self._precomputed.next_loss()
        if lost is None or facts.plan is None:
            return None
        alive = [worker for worker in facts.plan.members if worker not in lost]
        # The same question as in a recovery; its answer is about slots, too.
        request = self._request(facts.strategy, facts.known(), facts.plan, alive)
        answer = self._by_choice.ask(request, BY_CHOICE_S)
        if isinstance(answer, NoPlan) and answer.unanswered:
            self._precomputed.give_up()
        else:
            self._precomputed.keep(request, answer)
        return answer

    def rehearse(self, facts: JobFacts) -> None:
        """Plan for this job's first plan with a slow worker and with a dead one, while workers build the model.

        The first plan takes longer: machine code is loaded or, once per installation, made for most of a minute. No
        recovery shall wait for that, and no change that pays; plans that are made ahead may.
        """
        if facts.job is None or facts.strategy == UNIFORM:
            return
        known, own = facts.known()
        shape = JobShape(
            known.tensor_parallel, facts.job.pipeline_parallel or 1, known.micro_batches, self._sizes[1],
            facts.job.micro_batch_group, bool(facts.job.distributed_optimizer), bool(facts.job.spread_replicas),
            facts.sharings, known.equal_rounds,
        )  # fmt: skip
        try:
            plan = initial_plan(shape, self._workers, bool(facts.job.pipeline_last))
        except NoPlanError:
            return  # the coordinator ends the job for that
        well = dict.fromkeys(plan.members, 1.0)
        slow, alive = {**well, plan.members[0]: REHEARSED_SPEED}, dict(list(well.items())[:-1])
        requests = [PlannerRequest(facts.strategy, known, own, *self._sizes, plan, speeds) for speeds in (slow, alive)]
        self._in_recoveries.rehearse(*requests)
        if (facts.job.act or OBSERVE) != OBSERVE:
            self._by_choice.rehearse(*requests)

    def _request(
        self, strategy: str, known: tuple[KnownJob, tuple[Chunk, ...]], plan: ParallelPlan, alive: Iterable[int]
    ) -> PlannerRequest:
        """What to ask a planner, about slots. `known`: as of `JobFacts.known`."""
        alive = list(alive)
        slots, workers_per_node = self._sizes
        links = links_of_slots(self._speeds.links(alive), slots)
        return PlannerRequest(
            strategy, *known, slots, workers_per_node,
            plan=renamed(plan, lambda worker: slot_of(worker, slots)),
            speeds={slot_of(worker, slots): speed for worker, speed in self._speeds.of(alive).items()},
            links=tuple((*ends, speed) for ends, speed in links.items()),
            cost_model=str(self._cost_model),
        )  # fmt: skip

    def _named(self, answer: PlannerAnswer, alive: Iterable[int]) -> PlannerAnswer:
        """The same answer about these workers instead of their slots."""
        if isinstance(answer, NoPlan):
            return answer
        names = workers_in_slots(alive, self._sizes[0])
        return replace(answer, plan=renamed(answer.plan, lambda slot: names.get(slot, slot)))


def _written_at(path: Path) -> float | None:
    """When the file was changed last; None: there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
