# SPDX-License-Identifier: Apache-2.0
"""The detector of a running job: events and messages in, verdicts out, everything kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_resihp.detector import kept_records
from megatron_resihp.detector.input.recording import FILE_NAME, Recording
from megatron_resihp.detector.input.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord, OpKind, SpanKind
from megatron_resihp.detector.input.wire import pack
from megatron_resihp.detector.inquiry import PAUSE
from megatron_resihp.detector.judging import prediction
from megatron_resihp.detector.judging.learned import load
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.service import COST_MODEL_NAME, DetectionService
from megatron_resihp.detector.validation import Suspicion
from megatron_resihp.detector.verdict import Change, Kind, Verdict
from megatron_resihp.events.codec import plain, read_event
from megatron_resihp.events.event import stamped
from megatron_resihp.events.job import RunStarted
from megatron_resihp.plan import Chunk, ParallelPlan, Replica
from megatron_resihp.protocol.notices import ValidationOrder

REPLICAS, MICRO_BATCHES = 4, 4
LEARNED = 60
"""Iterations after which the detector knows what is normal."""
SLOW, SPEED = 2, 0.6


def plan(replicas: int = REPLICAS) -> ParallelPlan:
    """One worker to a replica."""
    return ParallelPlan(tuple(
        Replica(((worker,),), tuple(range(worker, replicas * MICRO_BATCHES, replicas))) for worker in range(replicas)
    ))  # fmt: skip


def unlike_plan() -> ParallelPlan:
    """The same workers, the last two of them two stages of unlike layers."""
    count = REPLICAS * MICRO_BATCHES
    shares = [tuple(range(number, count, REPLICAS - 1)) for number in range(REPLICAS - 1)]
    whole, cut = (Chunk(0, 0, 4),), (Chunk(0, 0, 1), Chunk(1, 1, 4))
    return ParallelPlan((
        Replica(((0,),), shares[0], whole),
        Replica(((1,),), shares[1], whole),
        Replica(((SLOW,), (3,)), shares[2], cut),
    ))  # fmt: skip


def plan_of_others(standbys: Mapping[int, None]) -> ParallelPlan:
    """All work but the victim."""
    workers = [worker for worker in range(REPLICAS) if worker != SLOW]
    return ParallelPlan(tuple(Replica(((worker,),), (n, n + 3)) for n, worker in enumerate(workers)), dict(standbys))


def record(worker: int, iteration: int, *, epoch: int = 0, speed: float = 1.0, stall: float = 0.0) -> IterationRecord:
    """What a worker measures; every op takes 10 ms or so at full speed."""
    random = np.random.default_rng([worker, iteration])
    indices = np.arange(worker, REPLICAS * MICRO_BATCHES, REPLICAS)
    ops = np.zeros(2 * MICRO_BATCHES, OP)
    ops["kind"], ops["micro_batch"] = np.tile([OpKind.F, OpKind.B], MICRO_BATCHES), np.repeat(indices, 2)
    workload = np.zeros(MICRO_BATCHES, WORKLOAD)
    workload["micro_batch"], workload["tokens"] = indices, 1024
    workload["squares"] = random.uniform(1e5, 1e6, MICRO_BATCHES)
    seconds = np.repeat(0.005 + 5e-9 * workload["squares"], 2) * np.tile([1.0, 2.0], MICRO_BATCHES)
    ends = np.cumsum(seconds * random.normal(1.0, 0.01, len(ops)) / speed) + stall
    ops["start"], ops["end"] = 100 * iteration + np.concatenate([[stall], ends[:-1]]), 100 * iteration + ends
    spans = np.zeros(1, SPAN)
    spans["kind"], spans["start"], spans["end"] = SpanKind.DATA, 100 * iteration, 100 * iteration + stall
    end = 100 * iteration + float(ends[-1]) + 0.01
    return IterationRecord(
        epoch, iteration, worker, 0, 100.0 * iteration, end, ops, np.zeros(0, TRANSFER), workload, spans
    )


class Job:
    """A job that is told to a service."""

    def __init__(self, run_dir: Path, slow: Sequence[Any] = (), taken_over: bool = False, **job: Any) -> None:
        self.orders: list[ValidationOrder] = []
        self.service = DetectionService(run_dir, self.orders.append, slow, taken_over)
        self.events: list[Any] = []
        self.tell(event="run_started", world_size=REPLICAS, nproc_per_node=REPLICAS, most_nodes=1)
        self.tell(event="job", global_batch_size=16, train_iters=1000, false_alarms_per_job=0.01,
                  gemm=[64, 64, 64], **job)  # fmt: skip
        self.tell(event="epoch_started", epoch=0, plan=plan().to_dict())

    def tell(self, **event: Any) -> None:
        self.events += self.service.note(read_event({"time": 0.0, **event}))

    def run(
        self, iterations: range, workers: Sequence[int] = range(REPLICAS), slow: bool = False, **changes: Any
    ) -> None:
        for iteration in iterations:
            for worker in workers:
                speed = SPEED if slow and worker == SLOW else 1.0
                message = pack(record(worker, iteration, speed=speed, **changes))
                self.events += self.service.take(message, float(iteration))
        self.events += self.service.look(float(iterations.stop))

    def finish(self) -> None:
        self.events += self.service.finish()

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.name == name]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for event in job.events:
        assert read_event(json.loads(json.dumps(plain(stamped(event, 1.0))))).name == event.name


def test_a_healthy_job_has_a_summary_and_no_verdict(job: Job, tmp_path: Path) -> None:
    job.run(range(1, LEARNED + 40))
    job.finish()
    (summary,) = job.events
    assert summary.name == "detection" and summary.warm and not summary.faults
    assert summary.iterations == LEARNED + 39 and summary.records == REPLICAS * (LEARNED + 39)
    assert (tmp_path / COST_MODEL_NAME).exists()


def test_a_slow_worker_is_named_and_its_recovery_too(job: Job) -> None:
    job.run(range(1, LEARNED))
    job.run(range(LEARNED, LEARNED + 20), slow=True)
    job.run(range(LEARNED + 20, LEARNED + 50))
    onset, *_, recovery = job.named("verdict")
    assert onset.workers == (SLOW,) and onset.kind == "compute" and onset.change == "onset"
    assert onset.speed_low <= SPEED <= onset.speed_high
    assert LEARNED <= onset.iteration <= LEARNED + 5
    assert recovery.change == "recovery" and recovery.workers == (SLOW,)


def test_a_stalled_data_loader_is_a_notice_told_once_and_no_verdict(job: Job) -> None:
    job.run(range(1, LEARNED))
    job.run(range(LEARNED, LEARNED + 5), stall=1.0)
    job.run(range(LEARNED + 5, LEARNED + 10))
    (notice,) = job.named("notice")
    assert notice.what == "data" and notice.iteration == LEARNED and notice.seconds == pytest.approx(1.0)
    assert not job.named("verdict")


def test_damaged_messages_are_counted(job: Job) -> None:
    job.run(range(1, 4))
    job.events += job.service.take(b"no record at all, but long enough to hold the header of one, if it were", 4.0)
    job.finish()
    assert job.named("detection")[0].faults == {"foreign": 1}


def test_the_next_epoch_is_judged_by_its_own_layout(job: Job) -> None:
    job.run(range(1, LEARNED))
    job.tell(event="epoch_started", epoch=1, plan=plan(REPLICAS - 1).to_dict())
    job.run(range(LEARNED, LEARNED + 40), workers=range(REPLICAS - 1), epoch=1)
    job.finish()
    assert not job.named("verdict")
    assert job.named("detection")[0].iterations == LEARNED + 39


def test_slowness_and_recovery_are_seen_across_a_plan_of_unlike_stages(job: Job) -> None:
    job.run(range(1, LEARNED))
    job.run(range(LEARNED, LEARNED + 20), slow=True)
    job.tell(event="epoch_started", epoch=1, plan=unlike_plan().to_dict())
    job.run(range(LEARNED + 20, LEARNED + 60), slow=True, epoch=1)
    assert {event.change for event in job.named("verdict")} <= {"onset", "severity"}
    job.run(range(LEARNED + 60, LEARNED + 90), epoch=1)
    job.finish()
    recovery = job.named("verdict")[-1]
    assert recovery.change == "recovery" and recovery.workers == (SLOW,)
    assert not job.named("detection_failed")


def test_costs_of_unlike_stages_do_not_take_the_place_of_the_jobs_own(job: Job, tmp_path: Path) -> None:
    job.run(range(1, LEARNED))
    before = (tmp_path / COST_MODEL_NAME).read_text()
    job.tell(event="epoch_started", epoch=1, plan=unlike_plan().to_dict())
    job.run(range(LEARNED, 2 * LEARNED), epoch=1)
    job.finish()
    assert (tmp_path / COST_MODEL_NAME).read_text() == before


def test_suspects_are_ordered_to_measure_and_the_culprit_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    suspicion = Suspicion((0, 1), 0.5, 2, 3)
    monkeypatch.setattr(Monitor, "suspicions", lambda self: [suspicion])
    verdict = Verdict(Kind.COMPUTE, Change.ONSET, (1,), 0.5, 0.4, 0.6, 2, 3, 0)
    monkeypatch.setattr(Monitor, "settle", lambda self, of, found: [verdict] if of is suspicion and found else [])
    job.run(range(1, 4))
    (order,) = job.orders
    assert order.gemms[0].workers == (0, 1) and order.epoch == 0
    for worker, seconds in ((0, 0.01), (1, 0.02)):
        job.tell(
            event="validation", seconds=1.0, number=order.number, worker=worker, iteration=4, gemm_seconds=[seconds] * 5
        )
    assert [event.workers for event in job.named("verdict")] == [(1,)]
    (told,) = job.named("suspicion")
    assert told.workers == (0, 1) and told.speed == 0.5 and not told.tested


def test_who_was_slow_and_has_no_work_is_measured_now_and_then_until_it_is_well(job: Job) -> None:
    job.run(range(1, LEARNED))
    job.run(range(LEARNED, LEARNED + 20), slow=True)
    job.tell(event="epoch_started", epoch=1, plan=plan_of_others({SLOW: None}).to_dict())
    first = LEARNED + 20
    for seconds, recovered in ((0.02, False), (0.01, True)):
        job.orders.clear()
        job.run(range(first, first + PAUSE + 2), workers=(0, 1, 3), epoch=1)
        [order] = job.orders
        assert [gemm.workers for gemm in order.gemms] == [(0, SLOW)]
        for worker, measured in ((0, 0.01), (SLOW, seconds)):
            job.tell(
                event="validation",
                seconds=1.0,
                number=order.number,
                worker=worker,
                iteration=first,
                gemm_seconds=[measured] * 5,
            )
        assert (job.named("verdict")[-1].change == "recovery") == recovered
        first += PAUSE + 2
    job.orders.clear()
    job.run(range(first, first + PAUSE + 2), workers=(0, 1, 3), epoch=1)
    assert not job.orders and not job.named("suspicion"), "it is known who is slow"


def test_who_only_looks_well_without_work_is_measured_less_often(job: Job) -> None:
    """A device that throttles under load, and is cool when it is measured."""
    job.run(range(1, LEARNED))
    iteration, paused, told = LEARNED, [], []
    for epoch in (1, 3):
        job.run(range(iteration, iteration + 25), slow=True, epoch=epoch - 1)
        iteration, verdict = iteration + 25, job.named("verdict")[-1]
        assert verdict.change == "onset"
        told.append(verdict.relapses)
        job.orders.clear()
        job.tell(event="epoch_started", epoch=epoch, plan=plan_of_others({SLOW: None}).to_dict())
        while not job.orders:
            job.run(range(iteration, iteration + 1), workers=(0, 1, 3), epoch=epoch)
            iteration += 1
        paused.append(iteration - verdict.iteration)
        for worker in (0, SLOW):
            job.tell(
                event="validation", seconds=1.0, number=job.orders[-1].number, worker=worker, iteration=iteration,
                gemm_seconds=[0.01] * 5,
            )  # fmt: skip
        assert job.named("verdict")[-1].change == "recovery"
        job.tell(event="epoch_started", epoch=epoch + 1, plan=plan().to_dict())
    assert told == [None, 1]
    assert paused[0] < PAUSE and 2 * PAUSE <= paused[1] <= 2 * PAUSE + 2


def remembered(change: str = "onset") -> Any:
    """What a coordinator before this one has said of the victim."""
    return read_event({
        "time": 0.0, "event": "verdict", "kind": "compute", "change": change, "workers": [SLOW], "speed": SPEED,
        "since": 900, "iteration": 905,
    })  # fmt: skip


@pytest.mark.parametrize("works", [True, False])
def test_who_was_slow_before_another_coordinator_came_is_measured_until_it_is_well(tmp_path: Path, works: bool) -> None:
    """With work, its slow level is what this detector has learned as normal."""
    job = Job(tmp_path, [remembered()])
    workers = [worker for worker in range(REPLICAS) if works or worker != SLOW]
    if not works:
        job.tell(event="epoch_started", epoch=1, plan=plan_of_others({SLOW: None}).to_dict())
    first, epoch = 1, 0 if works else 1
    for seconds, recovered in ((0.02, 0), (0.01, 1)):
        job.orders.clear()
        while not job.orders:
            job.run(range(first, first + 1), workers=workers, epoch=epoch)
            first += 1
        assert [gemm.workers for gemm in job.orders[-1].gemms] == [(0, SLOW)]
        for worker, measured in ((0, 0.01), (SLOW, seconds)):
            job.tell(
                event="validation", seconds=1.0, number=job.orders[-1].number, worker=worker, iteration=first,
                gemm_seconds=[measured] * 5,
            )  # fmt: skip
        assert [event.change for event in job.named("verdict")] == ["recovery"] * recovered
    job.orders.clear()
    job.run(range(first, first + PAUSE + 2), workers=workers, epoch=epoch)
    assert not job.orders


def test_what_the_detector_finds_itself_is_not_measured(tmp_path: Path) -> None:
    job = Job(tmp_path, [remembered()])
    job.run(range(1, LEARNED), slow=True)
    assert [event.change for event in job.named("verdict")] == ["onset"] and not job.orders


def test_who_was_slow_and_is_dead_is_not_asked(job: Job) -> None:
    job.run(range(1, LEARNED))
    job.run(range(LEARNED, LEARNED + 20), slow=True)
    job.tell(event="epoch_started", epoch=1, plan=plan_of_others({}).to_dict())
    job.run(range(LEARNED + 20, LEARNED + 50), workers=(0, 1, 3), epoch=1)
    assert not job.orders


def test_a_validation_that_names_nobody_is_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Monitor, "suspicions", lambda self: [Suspicion((0, 1), 0.5, 2, 3)])
    job.run(range(1, 4))
    for worker in (0, 1):
        job.tell(event="validation", seconds=1.0, number=1, worker=worker, iteration=4, gemm_seconds=[0.01] * 5)
    assert [(event.tested, event.iteration) for event in job.named("suspicion")] == [(False, 1), (True, 4)]
    assert not job.named("verdict")


def test_everything_is_kept_for_later(job: Job, tmp_path: Path) -> None:
    job.run(range(1, 4))
    job.finish()
    recording = Recording(tmp_path / FILE_NAME)
    assert recording.job["train_iters"] == 1000
    layout, *messages = recording
    assert not isinstance(layout, bytes) and layout.workers.tolist() == list(range(REPLICAS))
    assert len(messages) == 3 * REPLICAS


def test_a_directory_that_cannot_be_written_ends_the_recording_and_not_the_judging(tmp_path: Path) -> None:
    job = Job(tmp_path / "missing")
    job.run(range(1, LEARNED))
    job.run(range(LEARNED, LEARNED + 10), slow=True)
    parts = [event.part for event in job.named("detection_failed")]
    assert parts == ["recording", "cost model"]
    assert [event.workers for event in job.named("verdict")][:1] == [(SLOW,)]


def test_the_costs_of_ops_and_iterations_and_their_errors_are_kept(job: Job, tmp_path: Path) -> None:
    job.run(range(1, LEARNED))
    model = load(tmp_path / COST_MODEL_NAME).model
    assert model.ops.informative[0, :2].all() and model.terms["rest"] == pytest.approx(0.01, abs=0.005)
    assert 0 < model.micro_batch_mape < 0.03 and 0 < model.iteration_mape < 0.03


@pytest.mark.parametrize("same_directory", [True, False])
def test_a_resumed_job_needs_no_warm_up(job: Job, tmp_path: Path, same_directory: bool) -> None:
    job.run(range(1, LEARNED))
    job.finish()
    path = tmp_path / COST_MODEL_NAME
    resumed = Job(tmp_path) if same_directory else Job(tmp_path / "elsewhere", cost_model=str(path))
    resumed.run(range(LEARNED, LEARNED + 15))
    resumed.run(range(LEARNED + 15, LEARNED + 25), slow=True)
    (told,) = resumed.named("detection_resumed")
    assert told.path == str(path) and told.fits and told.iteration == LEARNED + 9
    assert [event.workers for event in resumed.named("verdict")][:1] == [(SLOW,)]


def test_a_resumed_job_that_ends_early_keeps_what_was_known(job: Job, tmp_path: Path) -> None:
    job.run(range(1, LEARNED))
    job.finish()
    before = (tmp_path / COST_MODEL_NAME).read_text()
    again = Job(tmp_path)
    again.run(range(LEARNED, LEARNED + 15))
    again.finish()
    assert (tmp_path / COST_MODEL_NAME).read_text() == before


def test_a_damaged_file_in_the_directory_is_told_and_the_job_warms_up(tmp_path: Path) -> None:
    (tmp_path / COST_MODEL_NAME).write_text("{")
    job = Job(tmp_path)
    job.run(range(1, LEARNED))
    job.finish()
    (failure,) = job.named("detection_failed")
    assert failure.part == "cost model" and "is not JSON" in failure.error
    assert job.named("detection")[0].warm and load(tmp_path / COST_MODEL_NAME)


def test_what_cannot_be_predicted_is_judged_and_kept_all_the_same(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such program")

    monkeypatch.setattr(prediction, "Prediction", fail)
    job.run(range(1, LEARNED))
    job.run(range(LEARNED, LEARNED + 10), slow=True)
    assert [event.part for event in job.named("detection_failed")] == ["cost model"]
    assert [event.workers for event in job.named("verdict")][:1] == [(SLOW,)] and load(tmp_path / COST_MODEL_NAME)


def test_a_recording_does_not_grow_for_ever(job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kept_records, "MOST_KEPT", 10_000)
    job.run(range(1, 10))
    job.finish()
    assert [event.part for event in job.named("detection_failed")] == ["recording"]
    assert 5_000 < (tmp_path / FILE_NAME).stat().st_size < 15_000
    assert job.named("detection")[0].records == 9 * REPLICAS


def test_who_takes_over_records_once_the_one_before_leads_no_more(job: Job, tmp_path: Path) -> None:
    job.run(range(1, 10))
    path = tmp_path / FILE_NAME
    before = path.read_bytes()
    after = Job(tmp_path, taken_over=True)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    after.tell(event="coordinator_replaced", by="process 7 on login")
    after.run(range(10, 12))
    job.run(range(10, 20))
    layout, *messages = Recording(path)
    assert not isinstance(layout, bytes) and layout.epoch == 0 and len(messages) == 2 * REPLICAS
    assert path.read_bytes().startswith(before) and not after.events


def test_who_came_back_is_on_the_node_of_its_place(job: Job, tmp_path: Path) -> None:
    back = ParallelPlan(tuple(Replica(((worker,),), (worker % 4,)) for worker in (0, 1, 2 + REPLICAS, 3)))
    job.tell(event="epoch_started", epoch=1, plan=back.to_dict())
    job.finish()
    layout = list(Recording(tmp_path / FILE_NAME))[-1]
    assert not isinstance(layout, bytes) and not layout.node.any()


def test_nothing_is_said_of_a_run_without_the_plugin(tmp_path: Path) -> None:
    desk = DetectionService(tmp_path, lambda order: None)
    desk.note(RunStarted(world_size=8, nproc_per_node=8, most_nodes=1))
    assert desk.look(1.0) == desk.finish() == []
