# SPDX-License-Identifier: Apache-2.0
"""A training session on a cluster: a strategy runs through a trace, and its samples are counted.

Between two changes, the job runs at the speed that `planner.evaluation` gives its plan with the present health.
`Delays` holds the other costs of a change. Imports numpy, `plan`, `cost`, `planner` and this package's modules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import iteration_times
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.moves import seconds_to_move
from megatron_resihp.planner.running import AS_PLANNED, Running
from megatron_resihp.planner.strategies.registry import Change, Entry, ReactsTo
from megatron_resihp.simulator.traces import Event, Trace, What


@dataclass(frozen=True)
class Delays:
    """The delays between a change and the first iteration of the plan that answers it.

    Attributes:
        detect_dead_s: until a death is known. The job stands still from the death on, and repeats the broken iteration,
            on average half of one.
        detect_slow_iterations: until a change of speed is known, or a rejoined worker is used; training goes on
            (published: 2 to 3, ResiHP, arXiv 2605.06374, section 8).
        planning_s: of every plan (published: ResiHP 1.44 s at 64 GPUs); None uses the measured time, which varies.
            Training goes on meanwhile unless a worker died.
        checkpoint_every_s: between checkpoints. Strategies that restart need them, and all strategies once the
            survivors no longer hold the model.
        restart_s: from the decision to restart to the first iteration, without loading.
        storage_bandwidth: bytes/s at which each node loads a checkpoint.
    """

    detect_dead_s: float = 5.0
    detect_slow_iterations: float = 3.0
    planning_s: float | None = 1.44
    checkpoint_every_s: float = 1800.0
    restart_s: float = 180.0
    storage_bandwidth: float = 2e9


@dataclass(frozen=True)
class Segment:
    """A stretch of a session at one speed; `what` names the reason in one word."""

    start_s: float
    end_s: float
    samples_per_s: float
    what: str


@dataclass(frozen=True)
class Outcome:
    """The result of a strategy on a trace.

    Attributes:
        duration_s: of the session.
        segments: without gaps, from 0 to duration_s.
        lost_samples: samples that were trained and then lost in a restart.
        aborted: why training ended early, or "".
        changes: number of plans put in force.
        plan: the last plan.
    """

    duration_s: float
    segments: tuple[Segment, ...]
    lost_samples: float
    aborted: str
    changes: int
    plan: ParallelPlan

    @property
    def samples_per_s(self) -> float:
        """Mean over the whole session, downtime included."""
        trained = sum((part.end_s - part.start_s) * part.samples_per_s for part in self.segments)
        return (trained - self.lost_samples) / self.duration_s

    @property
    def stopped_s(self) -> float:
        """Seconds without training."""
        return sum(part.end_s - part.start_s for part in self.segments if part.samples_per_s == 0)


TRAINING, NOTICING, STOPPED, MOVING, ABORTED = "training", "noticing", "stopped", "moving", "aborted"

Clock = Callable[[], float]


def _keep(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    if any(worker not in health.speed for worker in plan.working):
        raise NoPlanError("a worker is dead, and no strategy reacts")
    return plan


UNMITIGATED: Final = Entry(_keep, "keeps its plan, at the speed of the slowest worker", Change.IN_PLACE, ReactsTo.DEAD)


class Judge:
    """Plans and their speeds for one job, each computed only once, however many sessions share it.

    Args:
        cost: what work costs; strategies plan with it.
        squares: Σ l² of each micro-batch, tokens², [iterations, micro-batches]; the mean time of these iterations sets
            a plan's speed. If empty, all micro-batches are typical.
        clock: seconds, to measure planning times.
    """

    def __init__(self, cost: JobCost, squares: Sequence[Sequence[float]] = (), clock: Clock = lambda: 0.0) -> None:
        self.cost = cost
        self._squares = np.array(squares)
        self._clock = clock
        self._iteration_s: dict[object, float] = {}
        self._plans: dict[object, tuple[ParallelPlan | str, float]] = {}

    def iteration_s(self, plan: ParallelPlan, health: Health, running: Running = AS_PLANNED) -> float:
        """Mean seconds of an iteration. Baselines that run plans otherwise know typical micro-batches only."""
        key = (plan.digest, _key(health), running)
        if key not in self._iteration_s:
            self._iteration_s[key] = self._mean_iteration_s(plan, health, running)
        return self._iteration_s[key]

    def _mean_iteration_s(self, plan: ParallelPlan, health: Health, running: Running) -> float:
        if self._squares.size and running is AS_PLANNED:
            return float(iteration_times(plan, health, self.cost, self._squares).mean())
        return running.evaluate(plan, health, self.cost).iteration_s

    def samples_per_s(self, plan: ParallelPlan, health: Health, running: Running = AS_PLANNED) -> float:
        return self.cost.micro_batches * self.cost.training.micro_batch_size / self.iteration_s(plan, health, running)

    def plan(self, entry: Entry, plan: ParallelPlan, health: Health) -> tuple[ParallelPlan, float]:
        """A strategy's next plan, and the seconds that it took to find.

        Raises:
            NoPlanError: raised by the strategy.
        """
        key = (entry.strategy, plan.digest, _key(health))
        if key not in self._plans:
            begun = self._clock()
            try:
                answer: ParallelPlan | str = entry.strategy(plan, health, self.cost)
            except NoPlanError as error:
                answer = str(error)
            self._plans[key] = (answer, self._clock() - begun)
        answer, seconds = self._plans[key]
        if isinstance(answer, str):
            raise NoPlanError(answer)
        return answer, seconds


def _key(health: Health) -> object:
    return tuple(sorted(health.speed.items())), tuple(sorted(health.link.items()))


class _State:
    """The workers that are dead or slow at the present point of a trace."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._dead: set[int] = set()
        self._speed: dict[int, float] = {}
        self._link: dict[tuple[int, int], float] = {}

    def apply(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.what is What.DEATH:
                self._dead.update(event.workers)
            elif event.what is What.REJOIN:
                self._dead.difference_update(event.workers)
            elif event.what is What.SPEED:
                self._speed.update(dict.fromkeys(event.workers, event.speed))
            else:
                self._link[event.workers[0], event.workers[1]] = event.speed

    @property
    def health(self) -> Health:
        live = [worker for worker in range(self._workers) if worker not in self._dead]
        links = {pair: speed for pair, speed in self._link.items() if speed < 1 and not self._dead.intersection(pair)}
        return Health({worker: self._speed.get(worker, 1.0) for worker in live}, links)


def healths(trace: Trace, workers: int) -> list[tuple[float, float, Health]]:
    """Start, end and health of each stretch of a trace."""
    state = _State(workers)
    stretches = []
    moments = trace.moments
    if not moments or moments[0][0] > 0:
        moments = [(0.0, ()), *moments]
    for (start, events), (end, _) in pairwise([*moments, (trace.duration_s, ())]):
        state.apply(events)
        stretches.append((start, end, state.health))
    return stretches


def capacity(trace: Trace, workers: int) -> float:
    """Σ p over live workers ÷ all workers, averaged over the session."""
    work = sum((end - start) * sum(health.speed.values()) for start, end, health in healths(trace, workers))
    return work / (trace.duration_s * workers)


def capacity_asked(trace: Trace, workers: int) -> float:
    """Like `capacity`, but time without any live worker counts with the capacity before it.

    The job needed that capacity, and a job that died has not trained in that time.
    """
    work, last = 0.0, float(workers)
    for start, end, health in healths(trace, workers):
        last = sum(health.speed.values()) or last
        work += (end - start) * last
    return work / (trace.duration_s * workers)


def run(
    entry: Entry, trace: Trace, plan: ParallelPlan, judge: Judge, delays: Delays = Delays(), free: bool = False
) -> Outcome:
    """Take a job through a trace.

    Args:
        entry: the strategy.
        trace: the events.
        plan: the layout at the start; its members are all workers of the cluster.
        judge: of this job; sessions may share it.
        delays: of changes.
        free: whether the strategy may choose its own layout at the start, at no cost.
    """
    return run_from([own_layout(entry, plan, judge) if free else plan], entry, trace, judge, delays)[0]


def own_layout(entry: Entry, plan: ParallelPlan, judge: Judge) -> ParallelPlan:
    """The layout that a strategy chooses while all workers are healthy; the given one if it has no plan."""
    try:
        return judge.plan(entry, plan, Health(dict.fromkeys(plan.members, 1.0)))[0]
    except NoPlanError:
        return plan


def run_from(
    plans: Sequence[ParallelPlan], entry: Entry, trace: Trace, judge: Judge, delays: Delays = Delays()
) -> list[Outcome]:
    """Take a job through a trace from each of several layouts of the same workers.

    The sessions run side by side, so that a strategy's caches last long enough for what does not depend on the layout.
    """
    sessions = [_Session(entry, plan, judge, delays) for plan in plans]
    before = Health(dict.fromkeys(plans[0].members, 1.0))
    for start, end, health in healths(trace, len(before.speed)):
        for session in sessions:
            session.go_on(start, end, before, health)
        before = health
    return [session.outcome(trace.duration_s) for session in sessions]


class _Session:
    """The job while it runs through its trace."""

    def __init__(self, entry: Entry, plan: ParallelPlan, judge: Judge, delays: Delays) -> None:
        self._entry, self._plan, self._judge, self._delays = entry, plan, judge, delays
        self._segments: list[Segment] = []
        self._lost = 0.0
        self._lost_until_s = 0.0
        self._aborted = ""
        self._changes = 0
        self._pending = False

    def outcome(self, duration_s: float) -> Outcome:
        return Outcome(duration_s, tuple(self._segments), self._lost, self._aborted, self._changes, self._plan)

    def go_on(self, start: float, end: float, before: Health, health: Health) -> None:
        """A stretch between two changes of health; an answer that is not in force at its end starts over in the next.

        Not modelled: a worker that dies and comes back before the answer to its death is in force. It counts as if it
        never died and kept its state. In the published traces (256 GPUs, 5 orders), no worker comes back in less than
        173 s. `restart`, whose answers take up to 5 minutes, meets such a case once in 2 of 5 sessions, and trains on
        at once.
        """
        if self._aborted:
            self._add(start, end, 0.0, ABORTED)
            return
        broken = any(worker not in health.speed for worker in self._plan.working)
        if not broken and not self._concerned(before, health):
            self._add(start, end, self._rate(health), TRAINING)
            return
        try:
            after, planning_s = self._judge.plan(self._entry, self._plan, health)
        except NoPlanError as error:
            self._pending = False
            self._aborted = str(error) if broken else ""
            self._add(start, end, 0.0 if broken else self._rate(health), ABORTED if broken else TRAINING)
            return
        if self._delays.planning_s is not None:
            planning_s = self._delays.planning_s
        moving_s = self._moving_s(after, health, broken)
        if broken:
            noticed = start + self._delays.detect_dead_s + planning_s
            ready = noticed + moving_s + 0.5 * self._judge.iteration_s(after, health, self._entry.running)
            self._add(start, min(end, noticed), 0.0, STOPPED)
        else:
            iteration_s = self._judge.iteration_s(self._plan, health, self._entry.running)
            noticed = start + self._delays.detect_slow_iterations * iteration_s + planning_s
            ready = noticed + moving_s
            self._add(start, min(end, noticed), self._rate(health), NOTICING)
        self._add(noticed, min(end, ready), 0.0, MOVING)
        self._pending = ready > end
        if not self._pending:
            self._changes += after != self._plan
            self._plan = after
            self._add(ready, end, self._rate(health), TRAINING)

    def _concerned(self, before: Health, health: Health) -> bool:
        """Whether the strategy makes a new plan for this change."""
        if self._pending:
            return True
        reacts = self._entry.reacts_to
        members = before.speed.keys() != health.speed.keys()
        if members:
            return reacts is not ReactsTo.SLOW
        return reacts is not ReactsTo.DEAD and before != health

    def _moving_s(self, after: ParallelPlan, health: Health, broken: bool) -> float:
        """How long the job stands still for the change of plans, without detection and planning."""
        if after == self._plan and not broken:
            return 0.0
        if self._entry.change is Change.IN_PLACE and not self._state_is_lost(health):
            moved = self._entry.running.bytes_to_move(self._plan, after, self._judge.cost)
            return seconds_to_move(moved, self._judge.cost)
        cost, delays = self._judge.cost, self._delays
        if broken:
            self._lose()
        size = cost.model.parameters * (cost.training.weight_bytes + cost.training.optimizer_bytes)
        nodes = len({worker // cost.workers_per_node for worker in after.working})
        return delays.restart_s + size * len(after.replicas) / (nodes * delays.storage_bandwidth)

    def _state_is_lost(self, health: Health) -> bool:
        try:
            self._entry.running.require_state(self._plan, health, self._judge.cost)
        except NoPlanError:
            return True
        return False

    def _lose(self) -> None:
        """Drop what was trained since the last checkpoint, which is half an interval old on average."""
        now = self._segments[-1].end_s if self._segments else 0.0
        last = max(now - self._delays.checkpoint_every_s / 2, self._lost_until_s)
        spans = ((part.end_s - max(part.start_s, last), part.samples_per_s) for part in self._segments)
        self._lost += sum(seconds * rate for seconds, rate in spans if seconds > 0)
        self._lost_until_s = now

    def _rate(self, health: Health) -> float:
        return self._judge.samples_per_s(self._plan, health, self._entry.running)

    def _add(self, start: float, end: float, samples_per_s: float, what: str) -> None:
        if end > start:
            self._segments.append(Segment(start, end, samples_per_s, what))
