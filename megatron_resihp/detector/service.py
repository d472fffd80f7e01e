# SPDX-License-Identifier: Apache-2.0
"""The detector of a running job: takes records and the run's events, and returns verdicts as events.

It runs on node 0 in its own thread (`control.head.detection`). It keeps all input in the run directory, so that `resihp
detect` can judge it again. Imports numpy, `plan`, `cost`, `events` and this package.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from megatron_resihp.config import FALSE_ALARMS_PER_JOB
from megatron_resihp.cost.fitted.store import FILE_NAME as COST_MODEL_NAME
from megatron_resihp.cost.fitted.store import CostModelError
from megatron_resihp.detector.input.assemble import Assembler
from megatron_resihp.detector.input.layout import layout_of
from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.recording import Recorder
from megatron_resihp.detector.inquiry import Inquiries
from megatron_resihp.detector.judging.held_up import HeldUp
from megatron_resihp.detector.judging.learned import Learned, load
from megatron_resihp.detector.keeper import Keeper
from megatron_resihp.detector.kept_records import KeptRecords, failed
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.remembered import Remembered
from megatron_resihp.detector.validation import Suspicion
from megatron_resihp.detector.verdict import Change, Kind, Verdict
from megatron_resihp.events import detection as told
from megatron_resihp.events.detection import Detection, DetectionResumed, Validation
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import CoordinatorReplaced, Job, RunStarted
from megatron_resihp.plan import Chunk, ParallelPlan
from megatron_resihp.plan.layers import interleaves
from megatron_resihp.plan.slots import node_of
from megatron_resihp.protocol.notices import ValidationOrder

NEVER: Final = float("inf")


class DetectionService:
    """Judges the records of one job. `control.head.detection.Judge` says when its methods are called.

    Args:
        run_dir: where records and the cost model are kept.
        order: takes notices for all workers.
        slow: what a coordinator before this one has said of workers and links that were slow last.
        taken_over: there was one. Until it is known that it leads no more, nothing is written.
    """

    def __init__(
        self, run_dir: Path, order: Callable[[ValidationOrder], None], slow: Iterable[told.Verdict] = (),
        taken_over: bool = False,
    ) -> None:  # fmt: skip
        self._order = order
        self._inquiries: Inquiries | None = None
        self._run_dir = run_dir
        self._places = self._workers_per_node = 1
        self._job: Job | None = None
        self._taken_over = taken_over
        self._records = KeptRecords(run_dir, taken_over)
        self._assembler = Assembler()
        self._monitor: Monitor | None = None
        self._layout: Layout | None = None
        self._standbys: frozenset[int] = frozenset()
        self._judged = 0
        self._keeper = Keeper(run_dir / COST_MODEL_NAME)
        self._known: Learned | None = None
        self._known_from: Path | None = None
        """Where the monitor's costs come from; None once that is reported."""
        self._held_up = HeldUp()
        self._remembered = Remembered(slow)

    def note(self, event: Event) -> list[Event]:
        """Take in an event of the job, or of an epoch that begins."""
        match event:
            case RunStarted(nproc_per_node=int(workers_per_node), most_nodes=int(nodes)):
                self._workers_per_node = workers_per_node
                self._places = nodes * workers_per_node
            case Job():
                self._job = event
                if event.gemm is not None:
                    m, n, k = event.gemm
                    self._inquiries = Inquiries((m, n, k))
                opened = [] if self._taken_over else self._records.open(event)
                return opened + self._load(event.cost_model)
            case CoordinatorReplaced() if self._job is not None:
                return self._records.open(self._job) + self._note_layout()
            case EpochStarted():
                plan = ParallelPlan.from_dict(event.plan)
                self._standbys = frozenset(plan.standbys)
                node_of_each = {each: node_of(each, self._places, self._workers_per_node) for each in plan.members}
                own = () if self._job is None else [Chunk(*chunk) for chunk in self._job.chunks or ()]
                return self._begin(layout_of(plan, event.epoch or 0, node_of_each, interleaves(own)))
            case Validation():
                return self._settle(event)
        return []

    def take(self, message: bytes, now: float) -> list[Event]:
        """Take a worker's message."""
        events = self._records.keep(message)
        return events + self._judge(self._assembler.add(message, now))

    def look(self, now: float) -> list[Event]:
        """Judge iterations that have waited long enough."""
        return self._records.write(Recorder.flush) + self._judge(self._assembler.poll(now))

    def finish(self) -> list[Event]:
        """Judge the remaining iterations, and summarise."""
        events = self._judge(self._assembler.poll(NEVER))
        events += self._save_model()
        events += self._records.write(Recorder.close)
        if self._monitor is not None:
            events.append(Detection(
                iterations=self._judged, records=self._assembler.counters.received, faults=self._faults(),
                warm=self._monitor.model is not None, held_up_s=self._held_up.totals(),
            ))  # fmt: skip
        return events

    def _faults(self) -> dict[str, int]:
        """What was left out, and why: before the monitor, then by it."""
        assert self._monitor is not None
        own = {f"iterations_{name}": count for name, count in asdict(self._monitor.counters).items() if count}
        return self._assembler.counters.nonzero() | own

    def _begin(self, layout: Layout) -> list[Event]:
        self._assembler.begin(layout)
        self._layout = layout
        if self._inquiries is not None:
            self._inquiries.drop()
        if self._monitor is None:
            assert self._job is not None and self._job.train_iters is not None
            budget = self._job.false_alarms_per_job
            budget = FALSE_ALARMS_PER_JOB if budget is None else budget
            self._monitor = Monitor(layout, budget, self._job.train_iters, known=self._known)
        else:
            self._monitor.change_layout(layout)
        self._keeper.begin(layout)
        return self._note_layout()

    def _note_layout(self) -> list[Event]:
        layout = self._layout
        return [] if layout is None else self._records.write(lambda recorder: recorder.layout(layout))

    def _judge(self, completed: Iterable[IterationObservations]) -> list[Event]:
        events: list[Event] = []
        for observations in completed:
            assert self._monitor is not None and self._layout is not None
            self._judged += 1
            if self._inquiries is not None:
                self._inquiries.relapses.worked(self._layout)
            events += self._tell(self._monitor.observe(observations))
            events += self._resumed(observations.iteration)
            events += self._learn(observations)
            events += self._inquire(observations.iteration)
            events += [event for notice in self._monitor.take_notices() for event in self._held_up.add(notice)]
        return events

    def _resumed(self, iteration: int) -> list[Event]:
        """Report whether an earlier run's costs fit this run, once that is known."""
        assert self._monitor is not None
        if self._known_from is None or (self._monitor.resumed and not self._monitor.watching):
            return []
        path, self._known_from = self._known_from, None
        return [DetectionResumed(path=str(path), fits=self._monitor.resumed, iteration=iteration)]

    def _learn(self, observations: IterationObservations) -> list[Event]:
        try:
            assert self._monitor is not None
            complete = self._keeper.add(observations, self._monitor.speed)
        except Exception as error:
            # The fit there is for other runs; its failure is no reason to stop judging.
            return [failed("cost model", error), *self._save_model()]
        return self._save_model() if complete else []

    def _tell(self, verdicts: Sequence[Verdict]) -> list[Event]:
        self._remembered.found(verdicts)
        return [verdict_event(verdict, self._relapses(verdict)) for verdict in verdicts]

    def _relapses(self, verdict: Verdict) -> int:
        if self._inquiries is None or (verdict.kind, verdict.change) != (Kind.COMPUTE, Change.ONSET):
            return 0
        return self._inquiries.relapsed(verdict.workers[0], verdict.iteration)

    def _inquire(self, iteration: int) -> list[Event]:
        """Ask suspects to validate if the evidence leaves several."""
        assert self._monitor is not None and self._layout is not None
        idle = [each for each in self._monitor.idle_suspects() if each.workers[0] in self._standbys]
        suspicions = self._monitor.suspicions() + idle + self._remembered_suspects(iteration)
        if not suspicions or self._inquiries is None:
            return []
        order = self._inquiries.ask(suspicions, self._layout.epoch, iteration)
        if order is None:
            return []
        self._order(order)
        return [_suspicion(each, iteration, tested=False) for each in self._inquiries.asked if not each.idle]

    def _remembered_suspects(self, iteration: int) -> list[Suspicion]:
        monitor, layout = self._monitor, self._layout
        assert monitor is not None and layout is not None
        if not monitor.watching or not self._remembered:
            return []
        working = layout.workers.tolist()
        well = (worker for worker in working if monitor.speed(worker) == 1.0)
        return self._remembered.suspects(self._standbys.union(working), well, iteration)

    def _settle(self, event: Validation) -> list[Event]:
        """Take a suspect's measurement."""
        if self._inquiries is None or self._monitor is None or event.worker is None:
            return []
        settled = self._inquiries.answer(event.number, event.worker, event.gemm_seconds)
        events: list[Event] = []
        for suspicion, found in settled:
            verdicts = self._monitor.settle(suspicion, found)
            verdicts += self._remembered.settle(suspicion, found, event.epoch or 0, event.iteration)
            events += self._tell(verdicts)
            if suspicion.idle and verdicts:
                self._inquiries.relapses.believe(suspicion.workers[0])
            if not found and not suspicion.idle:
                events.append(_suspicion(suspicion, event.iteration, tested=True))
        return events

    # ---- files

    def _load(self, named: str | None) -> list[Event]:
        """Load what an earlier run learned: the named run, or the one that used this directory before."""
        path = Path(named) if named else self._run_dir / COST_MODEL_NAME
        if self._monitor is not None or (named is None and not path.exists()):
            return []
        try:
            self._known = load(path)
        except CostModelError as error:
            return [failed("cost model", error)]
        self._known_from = path
        return []

    def _save_model(self) -> list[Event]:
        known = self._monitor.learned() if self._monitor is not None else None
        if known is None:
            return []
        try:
            self._keeper.save(known)
        except OSError as error:
            return [failed("cost model", error)]
        return []


def verdict_event(verdict: Verdict, relapses: int = 0) -> told.Verdict:
    """A verdict as the event log holds it."""
    return told.Verdict(
        epoch=verdict.epoch, kind=verdict.kind, change=verdict.change, workers=verdict.workers, speed=verdict.speed,
        speed_low=verdict.speed_low, speed_high=verdict.speed_high, since=verdict.since, iteration=verdict.iteration,
        evidence=verdict.evidence, relapses=relapses or None,
    )  # fmt: skip


def _suspicion(suspicion: Suspicion, iteration: int, tested: bool) -> told.Suspicion:
    return told.Suspicion(
        workers=suspicion.workers, speed=1 - suspicion.slowdown, since=suspicion.since, iteration=iteration,
        tested=tested,
    )  # fmt: skip
