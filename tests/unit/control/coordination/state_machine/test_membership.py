# SPDX-License-Identifier: Apache-2.0
"""The coordinator's decisions: messages of workers and agents in, plans and ends out. No processes, no clock."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import recorded

from megatron_resihp.control import exit_codes
from megatron_resihp.control.coordination.actions import (
    Action,
    End,
    Limits,
    Log,
    Notify,
    Phase,
    Reopen,
    Reply,
)
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.recovery.inventory import Survivors
from megatron_resihp.control.replanning.recovery.next_plan import NextPlan, uniform_or_less
from megatron_resihp.events.event import Event
from megatron_resihp.events.workers import LinkFailed
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Shard, deal, rules, spelled_out
from megatron_resihp.plan.slots import renamed
from megatron_resihp.protocol.answers import Refused
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import (
    CommunicationFailed,
    ConnectionLost,
    DrainRequest,
    EmergencyCheckpointWritten,
    GroupsPrepared,
    HeartbeatsMissing,
    JobStarted,
    JoinRequest,
    LeaveRequest,
    Message,
    ModelBuilt,
    NodeLost,
    NodeReport,
    NodesDown,
    NoticeUnheard,
    PlanRequest,
    ProcessExited,
    Ready,
    ScriptEnded,
    ScriptFailed,
    StillSaving,
    StopRequest,
    Survivor,
    SurvivorReport,
    TrainingFinished,
    WorkerRestarted,
)
from megatron_resihp.protocol.notices import (
    EpochIsBroken,
    JobEnds,
    NodeReleased,
    OthersFinish,
    PlanChange,
    StopTraining,
    WorkerDismissed,
    WorkersGivenUp,
    WorkersTakenIn,
)
from megatron_resihp.protocol.published import EmergencyCheckpointOrder, EpochPlan, Go
from megatron_resihp.protocol.records import IterationPhase, Outcome, Record

LIMITS = Limits(report_s=10.0, build_s=100.0, save_s=50.0, recoveries_per_iteration=3)


class Job:
    """A job's coordinator, and workers that do what they are told. All of them run PP 2 x DP 2 unless said otherwise.

    Attributes:
        at: the iteration and stage that workers report; who is not in it is computing `iteration`.
        actions: what the coordinator has done, all of it.
    """

    def __init__(
        self, workers: int = 4, pipeline: int = 2, tensor: int = 1, micro_batches: int = 4, late_nodes: int = 0,
        min_workers: int = 1, per_node: int | None = None,
    ) -> None:  # fmt: skip
        per_node = per_node or (2 if workers % 2 == 0 else 1)
        size, limits = JobSize(workers // per_node, per_node, late_nodes), replace(LIMITS, min_workers=min_workers)
        self.membership = recorded(size, limits, self._plan)
        self.next_plan: NextPlan = uniform_or_less
        self.own = tuple(Chunk(stage, 3 * stage, 3 * stage + 3) for stage in range(pipeline))
        self.description = JobDescription(tensor, pipeline, micro_batches, self.own, 8, False, True)
        self.now = 0.0
        self.iteration = 5
        self.at: dict[int, tuple[int, IterationPhase]] = {}
        self.held: dict[int, tuple[Shard, ...]] = {}
        self.actions: list[Action] = []

    @property
    def state(self) -> State:
        return self.membership.state

    def _plan(self, survivors: Survivors) -> tuple[ParallelPlan, list[Event]]:
        return self.next_plan(survivors)

    def tell(self, message: Any) -> list[Action]:
        return self._take(self.membership.handle(message, self.now))

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self._take(self.membership.tick(seconds, self.now))

    def _take(self, actions: list[Action]) -> list[Action]:
        self.actions += actions
        for action in actions:
            if isinstance(action, Go):
                assert self.state.plan is not None
                # Only now do workers let go of what they held.
                full = spelled_out(self.state.plan, self.own)
                waiting = dict.fromkeys(self.state.joining.waiting, ())
                self.held = {**waiting, **{w: full.shards_of(w) for w in full.members}}
        return actions

    # What workers do

    def describe(self, worker: int, **changed: Any) -> list[Action]:
        return self.tell(JobStarted(worker, replace(self.description, **changed)))

    def ready(self, *workers: int, state: str = "same", **fields: Any) -> list[Action]:
        return [
            action
            for worker in workers
            for action in self.tell(replace(
                Ready(worker, self.state.epoch, self.digests(worker, state), (9000 + worker,), 0, 1), **fields
            ))
        ]  # fmt: skip

    def report(self, *workers: int, **fields: Any) -> list[Action]:
        return [
            action
            for worker in workers
            for action in self.tell(replace(
                SurvivorReport(worker, self.state.epoch, self.record(worker), self.held[worker]), **fields
            ))
        ]  # fmt: skip

    def digests(self, worker: int, state: str) -> dict[str, str]:
        plan = self.state.plan
        if plan is None:
            return {}
        if plan.not_uniform is None:
            coordinate = plan.coordinate_of(worker)
            return {"{}/{}".format(*coordinate): state} if coordinate else {}
        cuts = math.lcm(*(shard.tp_degree for member in plan.members for shard in plan.shards_of(member)))
        return {
            f"{layer}/{cut}/{cuts}": state
            for first, end, rank, degree, *_ in plan.shards_of(worker)
            for layer in range(first, end)
            for cut in range(rank * cuts // degree, (rank + 1) * cuts // degree)
        }

    def record(self, worker: int) -> Record:
        iteration, stage = self.at.get(worker, (self.iteration, IterationPhase.COMPUTE))
        known = [n for n in (iteration - 1, iteration) if n < iteration or stage >= IterationPhase.AGREED]
        plan = self.state.plan
        return Record(
            iteration, stage, plan is None or plan.replica_of(worker) is not None,
            {n: Outcome(0, 1.5, ((8.0, 4.0),), ("lm loss",)) for n in known},
            {n: {"iteration": n - 1} for n in (iteration - 1, iteration)},
        )  # fmt: skip

    def apply(self, plan: Any, **fields: Any) -> list[Action]:
        data = plan.to_dict() if isinstance(plan, ParallelPlan) else plan
        return self.tell(replace(PlanRequest(data, "asked for by hand", answer="answer/1"), **fields))

    def leave(self, *workers: int) -> list[Action]:
        """Workers report after the step that all have agreed on."""
        self.at = {worker: (self.iteration, IterationPhase.STEPPED) for worker in self.state.living}
        return self.report(*workers)

    def kill(self, worker: int, number: int = signal.SIGKILL) -> list[Action]:
        return self.tell(ProcessExited(worker, code=-number, time=self.now))

    def come_back(self, worker: int, **changed: Any) -> list[Action]:
        """A worker that was started anew is ready for a plan."""
        self.held.setdefault(worker, ())
        return self.tell(JoinRequest(worker, replace(self.description, **changed)))

    # Ways to a state

    def start(self) -> Job:
        return self.start_with()

    def start_with(self, **changed: Any) -> Job:
        self.describe(0, **changed)
        self.ready(*range(self.state.job.size.workers))
        assert self.state.phase is Phase.RUNNING
        return self

    def recover(self, died: Iterable[int]) -> Job:
        for worker in died:
            self.kill(worker)
        self.report(*sorted(self.state.living))
        self.ready(*self.members)
        assert self.state.phase is Phase.RUNNING
        return self

    @property
    def members(self) -> tuple[int, ...]:
        assert self.state.plan is not None
        return self.state.plan.members


def only(kind: type, actions: list[Action]) -> Any:
    """The one action of a kind."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, f"{len(found)} x {kind.__name__} in {actions}"
    return found[0]


def events(actions: list[Action], name: str) -> list[Any]:
    return [action.event for action in actions if isinstance(action, Log) and action.event.name == name]


def notices(actions: list[Action]) -> list[type]:
    return [type(action.notice) for action in actions if isinstance(action, Notify)]


class TestStartUp:
    def test_from_the_first_worker_to_go(self) -> None:
        job = Job()
        published = only(EpochPlan, job.describe(2))
        assert (published.epoch, published.commit) == (0, None)
        assert published.plan.grid.rank_order() == (0, 1, 2, 3)
        assert not job.describe(0), "told twice"
        assert not job.ready(0, 1, 2)
        actions = job.ready(3)
        assert only(Go, actions).ports == (9000, 9001, 9002, 9003)
        assert events(actions, "epoch_started")[0].epoch == 0
        assert not events(actions, "recovery")

    def test_replicas_are_spread_where_that_is_asked_for(self) -> None:
        """In Megatron's order each node would have a stage; what the job says of losses is of the layout it has."""
        job = Job()
        plan = only(EpochPlan, job.describe(0, spread_replicas=True)).plan
        assert [replica.stages for replica in plan.replicas] == [((0,), (1,)), ((2,), (3,))]
        job.ready(0, 1, 2)
        [exposed] = events(job.ready(3), "exposed")
        assert exposed.nodes == (0,) and "any other one may be lost" in exposed.said

    @pytest.mark.parametrize(
        ("fewest", "nodes", "workers"), [(4, (0, 1), (0, 1, 2, 3)), (3, (0, 1), ()), (2, (0,), ())]
    )
    def test_losses_that_leave_too_few_workers_are_told(
        self, fewest: int, nodes: tuple[int, ...], workers: tuple[int, ...]
    ) -> None:
        job = Job(min_workers=fewest)
        job.describe(0, pipeline_last=False)
        job.ready(0, 1, 2)
        [exposed] = events(job.ready(3), "exposed")
        assert (exposed.nodes, exposed.workers) == (nodes, workers)

    @pytest.mark.parametrize("described", [False, True])
    def test_a_death_ends_the_job(self, described: bool) -> None:
        job = Job()
        if described:
            job.describe(0)
            job.ready(0, 1)
        end = only(End, job.kill(3))
        assert end.code == exit_codes.RETRY
        assert "worker 3 (exit signal 9) died during start-up" in end.reason

    def test_sizes_that_do_not_fit(self) -> None:
        end = only(End, Job(workers=5).describe(0))
        assert end.code == 2 and "5 workers are not a multiple" in end.reason

    def test_workers_with_different_sizes(self) -> None:
        job = Job()
        job.describe(0)
        end = only(End, job.describe(1, micro_batches=8))
        assert end.code == exit_codes.REFUSED and "different sizes" in end.reason

    def test_holders_that_start_with_different_state(self) -> None:
        job = Job()
        job.describe(0)
        job.ready(0, 1, 2)
        end = only(End, job.ready(3, state="other"))
        assert end.code == 1 and "state differs between holders of stage 1 TP rank 0" in end.reason

    @pytest.mark.parametrize("news", [ScriptFailed(2, "exit code 2", 2), ProcessExited(2, 2, 0.0)])
    def test_a_refusal_before_training_is_told_from_a_failure(self, news: Message) -> None:
        """argparse and the plugin refuse arguments with 2; the same code of a user's script later is a failure."""
        for job, code in ((Job(), 2), (Job().start(), 1)):
            end = only(End, job.tell(news))
            assert end.code == code

    def test_a_stop_signal(self) -> None:
        job = Job()
        job.describe(0)
        assert only(End, job.tell(StopRequest(signal=signal.SIGTERM, time=0.0))).code == 143

    def test_a_script_that_does_not_train(self) -> None:
        """No worker ever tells sizes: all just exit with 0."""
        job = Job(workers=2)
        assert not job.tell(ProcessExited(0, code=0, time=0.0))
        assert only(End, job.tell(ProcessExited(1, code=0, time=0.0))).code == 0

    def test_workers_that_end_before_they_train(self) -> None:
        """Nothing was trained, so nobody may take it for a success."""
        job = Job(workers=2)
        job.describe(0)
        job.tell(ScriptEnded(0))
        end = only(End, job.tell(ScriptEnded(1)))
        assert end.code == 1 and "ended before the first iteration" in end.reason

    @pytest.mark.parametrize("ready_first", [False, True])
    def test_who_leaves_before_it_was_ready_strands_nobody(self, ready_first: bool) -> None:
        job = Job()
        job.describe(0)
        if not ready_first:
            job.tell(ScriptEnded(1))
        actions = job.ready(0, 2, 3)
        if ready_first:
            actions = job.tell(ScriptEnded(1))
        end = only(End, actions)
        assert end.code == 1 and "worker 1 finished during start-up" in end.reason


class TestRecovery:
    def test_from_a_death_to_go(self) -> None:
        job = Job().start()
        job.now = 100.0
        actions = job.kill(0)
        assert notices(actions) == [EpochIsBroken]
        dead = events(actions, "worker_dead")[0]
        assert (dead.dead, dead.node, dead.cause, dead.noticed_at) == (0, 0, "exit signal 9", 100.0)
        assert events(actions, "epoch_broken")[0].broken_epoch == 0
        assert not job.report(1, 2)
        published = only(EpochPlan, job.report(3))
        assert published.epoch == 1
        assert published.plan.working == (1, 3) and set(published.plan.standbys) == {2}
        assert published.plan.replicas[0].micro_batches == (0, 1, 2, 3)
        assert published.commit.iteration == 4
        first, second = Shard(0, 3, 0, 1), Shard(3, 6, 0, 1)
        assert published.held == {1: (first,), 2: (second,), 3: (second,)}
        job.now = 101.5
        assert not job.ready(1, 2)
        actions = job.ready(3, bytes_received=7)
        assert only(Go, actions).epoch == 1
        recovery = events(actions, "recovery")[0]
        assert (recovery.from_epoch, recovery.to_epoch, recovery.dead) == (0, 1, (0,))
        assert (recovery.resumed_iteration, recovery.steps_redone, recovery.bytes_moved) == (4, 1, 7)
        assert (recovery.broken_at, recovery.resumed_at) == (100.0, 101.5)

    def test_a_step_that_somebody_agreed_on_is_everybodys(self) -> None:
        job = Job().start()
        job.at = {1: (5, IterationPhase.AGREED), 2: (5, IterationPhase.REDUCED), 3: (5, IterationPhase.REDUCED)}
        job.kill(0)
        actions = job.report(1, 2, 3)
        published = only(EpochPlan, actions)
        assert (published.commit.iteration, published.commit.replay) == (5, True)
        agreed = events(actions, "agreed")[0]
        assert (agreed.iteration, agreed.epoch, agreed.loss) == (5, 0, {"lm loss": 2.0})

    def test_a_worker_that_reports_breaks_the_epoch(self) -> None:
        """Its agent's message about the death may come later."""
        job = Job().start()
        assert notices(job.report(1)) == [EpochIsBroken]
        assert not notices(job.kill(0)), "told already"
        only(EpochPlan, job.report(2, 3))

    def test_a_death_during_building(self) -> None:
        job = Job().start()
        job.kill(0)
        job.report(1, 2, 3)
        job.ready(2)
        assert notices(job.kill(3)) == [EpochIsBroken]
        job.ready(1, epoch=1)
        assert job.state.phase is Phase.REPORTING, "ready for an epoch that broke is worth nothing"
        published = only(EpochPlan, job.report(1, 2))
        assert (published.epoch, published.plan.working, published.commit.iteration) == (2, (1, 2), 4)
        assert only(Go, job.ready(1, 2)).epoch == 2

    def test_a_death_while_others_report(self) -> None:
        job = Job().start()
        job.kill(0)
        job.report(1, 2)
        published = only(EpochPlan, job.kill(3))
        assert published.plan.members == (1, 2)

    def test_who_died_after_its_report_is_not_planned_with(self) -> None:
        job = Job().start()
        job.kill(0)
        job.report(3, 2)
        job.kill(3)
        published = only(EpochPlan, job.report(1))
        assert published.plan.members == (1, 2) and 3 not in published.held

    def test_time_of_the_break_is_that_of_the_first(self) -> None:
        job = Job().start()
        job.now = 10.0
        job.kill(0)
        job.report(1, 2, 3)
        job.now = 20.0
        job.kill(3)
        job.report(1, 2)
        assert events(job.ready(1, 2), "recovery")[0].broken_at == 10.0

    def test_a_suspicion_without_a_death(self) -> None:
        """A connection that failed costs a rebuild, and nobody's work."""
        job = Job().start()
        before = job.state.plan
        assert notices(job.tell(CommunicationFailed(2, epoch=0, error="connection reset"))) == [EpochIsBroken]
        assert not job.tell(CommunicationFailed(3, epoch=0, error="me too"))
        published = only(EpochPlan, job.report(0, 1, 2, 3))
        assert published.epoch == 1 and published.plan == before
        only(Go, job.ready(0, 1, 2, 3))

    def test_a_suspicion_of_an_older_epoch(self) -> None:
        job = Job().start().recover([0])
        assert not job.tell(CommunicationFailed(1, epoch=0, error="late"))
        assert job.state.phase is Phase.RUNNING

    def test_a_report_from_an_older_epoch(self) -> None:
        """A worker that is late with an epoch that nobody waits for breaks no newer one."""
        job = Job().start().recover([0])
        assert not job.report(1, epoch=0)
        assert job.state.phase is Phase.RUNNING

    def test_the_second_loss_finds_a_second_holder(self) -> None:
        job = Job().start().recover([0]).recover([3])
        assert job.state.plan is not None
        assert job.state.plan.working == (1, 2) and job.state.epoch == 2

    def test_counting_recoveries_without_a_step(self) -> None:
        job = Job().start()
        for _ in range(LIMITS.recoveries_per_iteration):
            job.tell(CommunicationFailed(1, epoch=job.state.epoch, error="flaky"))
            job.report(0, 1, 2, 3)
            job.ready(0, 1, 2, 3)
        job.tell(CommunicationFailed(1, epoch=job.state.epoch, error="flaky"))
        order = only(EmergencyCheckpointOrder, job.report(0, 1, 2, 3))
        assert "3 recoveries without a step after iteration 4" in order.reason

    def test_a_step_starts_the_count_anew(self) -> None:
        job = Job().start()
        for _ in range(3 * LIMITS.recoveries_per_iteration):
            job.tell(CommunicationFailed(1, epoch=job.state.epoch, error="flaky"))
            job.report(0, 1, 2, 3)
            only(Go, job.ready(0, 1, 2, 3))
            job.iteration += 1


class TestGivenUp:
    def test_who_does_not_report(self) -> None:
        job = Job().start()
        job.kill(0)
        job.report(1, 2)
        assert not job.wait(9.9)
        actions = job.wait(0.2)
        assert events(actions, "worker_dead")[0].cause == "did not report within 10 s"
        assert only(EpochPlan, actions).plan.members == (1, 2)

    def test_who_writes_a_checkpoint_is_waited_for(self) -> None:
        """As long again each time that it says so; another that says nothing as long as that."""
        job = Job().start()
        assert job.tell(StillSaving(1, 0)) == [], "no epoch is broken"
        job.kill(0)
        job.report(2)
        for _ in range(3):
            assert not job.wait(9.9)
            assert job.tell(StillSaving(1, 0)) == []
        assert not job.wait(5.0)
        job.report(1)
        job.tell(StillSaving(1, 0))  # it has reported
        job.tell(StillSaving(3, 1))  # of an epoch that is none
        assert not job.wait(4.9)
        actions = job.wait(0.2)
        assert [event.dead for event in events(actions, "worker_dead")] == [3]
        assert only(EpochPlan, actions).plan.members == (1, 2)

    def test_who_keeps_others_from_becoming_ready(self) -> None:
        """Worker 2 waits for worker 3, which hangs: of both only the one that does not report either is given up."""
        job = Job().start()
        job.kill(0)
        job.report(1, 2, 3)
        job.ready(1)
        assert not job.wait(99.0)
        actions = job.wait(2.0)
        assert events(actions, "epoch_broken")[0].cause == "not ready within 100 s: 2, 3"
        assert notices(actions) == [EpochIsBroken] and not events(actions, "worker_dead")
        job.report(1, 2)
        actions = job.wait(10.1)
        assert [event.dead for event in events(actions, "worker_dead")] == [3]
        assert only(EpochPlan, actions).plan.members == (1, 2)

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
    def test_a_node_s_report_is_as_good_as_its_workers_own(self, order: tuple[int, ...]) -> None:
        alone, together = Job().start(), Job().start()
        alone.kill(3)
        together.kill(3)
        record = alone.record(0)
        own = [SurvivorReport(w, 0, record, alone.held[w], times={5: {"started": float(w)}}) for w in order]
        joined = NodeReport(0, record, tuple(Survivor(each.worker, "a", each.held, each.times) for each in own))
        assert together.tell(joined) == [action for each in own for action in alone.tell(each)]
        assert together.state.epoch == 1 and together.state.commit == alone.state.commit
        assert together.state.reports.records == alone.state.reports.records

    def test_what_a_node_reports_of_a_dead_worker_does_not_count(self) -> None:
        job = Job().start()
        job.kill(3)
        record = job.record(0)
        assert job.tell(NodeReport(0, record, tuple(Survivor(w, "a", job.held[w], {}) for w in (3, 1)))) == []
        assert set(job.state.reports.records) == {1}

    def test_nothing_is_late_while_training(self) -> None:
        assert not Job().start().recover([0]).wait(1e9)

    def test_a_silent_worker_is_fenced(self) -> None:
        """What it says when it wakes up is heard by nobody, and the plan has no place for it."""
        job = Job().start()
        actions = job.tell(HeartbeatsMissing(3, silence_s=30.04, time=0.0))
        assert events(actions, "worker_dead")[0].cause == "no heartbeat for 30.0 s"
        published = only(EpochPlan, job.report(0, 1, 2))
        assert 3 not in published.plan.members
        job.ready(0, 1, 2)
        for late in (
            SurvivorReport(3, 0, job.record(3), (Shard(3, 6, 0, 1),)),
            SurvivorReport(3, 1, job.record(3), (Shard(3, 6, 0, 1),)),
            CommunicationFailed(3, 1, "everybody is gone"),
            Ready(3, 1, {"1/0": "old"}, (), 0, 0),
            ScriptFailed(3, "RuntimeError: gloo", 1),
            TrainingFinished(3, 5),
            ScriptEnded(3),
            ProcessExited(3, exit_codes.FENCED, 1.0),
            ProcessExited(3, 0, 1.0),
            ProcessExited(3, 1, 1.0),
            ConnectionLost(3, 1.0),
        ):
            assert job.tell(late) == []
            assert job.state.phase is Phase.RUNNING
        # Also not later: the next death is recovered from as if it had not spoken.
        job.kill(1)
        assert only(EpochPlan, job.report(0, 2)).plan.working == (0, 2)

    def test_nobody_waits_for_a_worker_that_can_not_hear(self) -> None:
        job = Job().start()
        assert job.tell(NoticeUnheard(3, 0, 3.04, 0.0)) == [], "no epoch is broken"
        job.kill(0)
        job.report(1, 2)
        assert job.tell(NoticeUnheard(1, 0, 3.04, 0.0)) == [], "it has reported"
        actions = job.tell(NoticeUnheard(3, 0, 3.04, 0.0))
        cause = "did not hear within 3.0 s that the epoch is broken"
        assert [action.notice for action in actions if isinstance(action, Notify)] == [WorkersGivenUp((3,), cause)]
        assert events(actions, "worker_dead")[0].cause == cause
        assert only(EpochPlan, actions).plan.members == (1, 2)
        job.ready(1, 2)
        job.kill(1)
        assert job.tell(NoticeUnheard(2, 0, 3.0, 0.0)) == [], "another epoch is broken now"

    def test_a_node_is_lost(self) -> None:
        job = Job().start()
        actions = job.tell(NodeLost(node=1, cause="connection lost", time=0.0))
        assert [event.dead for event in events(actions, "worker_dead")] == [2, 3]
        assert "node lost: connection lost" in events(actions, "epoch_broken")[0].cause
        order = only(EmergencyCheckpointOrder, job.report(0, 1))
        assert order.missing == (Shard(3, 6, 0, 1),)

    def test_a_node_with_a_copy_of_everything_is_lost(self) -> None:
        job = Job(pipeline=1, tensor=2).start()
        job.tell(NodeLost(node=0, cause="no heartbeat", time=0.0))
        assert only(EpochPlan, job.report(2, 3)).plan.working == (2, 3)

    def test_connection_lost(self) -> None:
        actions = Job().start().tell(ConnectionLost(2, time=0.0))
        assert events(actions, "worker_dead")[0].cause == "connection lost" and notices(actions) == [EpochIsBroken]

    def test_a_living_worker_that_fences_itself(self) -> None:
        job = Job().start()
        actions = job.tell(ProcessExited(2, code=exit_codes.FENCED, time=0.0))
        assert events(actions, "worker_dead")[0].cause == "fenced itself"

    def test_one_death_is_told_once(self) -> None:
        job = Job().start()
        job.kill(0)
        assert job.tell(ConnectionLost(0, 0.0)) == []
        assert job.tell(HeartbeatsMissing(0, 6.0, 0.0)) == []
        assert job.tell(NodeLost(node=0, cause="gone", time=0.0)) != [], "worker 1 was there too"


class TestEnd:
    def test_all_are_done(self) -> None:
        job = Job().start()
        for worker in (0, 1, 2):
            job.tell(TrainingFinished(worker, iteration=5))
            assert not job.tell(ScriptEnded(worker))
        actions = job.tell(ScriptEnded(3))
        assert only(End, actions) == End(0, "finished")
        assert notices(actions) == [JobEnds] and events(actions, "run_finished")[0].exit_code == 0

    def test_a_word_alone_ends_nothing_before_the_last_iteration(self) -> None:
        """Not with all workers' names under it; and what agents say ends it as what it is."""
        job = Job()
        job.description = replace(job.description, train_iters=20)
        job.start()
        job.membership.progressed(7)
        for worker in (*range(4), *range(4)):
            assert job.tell(ScriptEnded(worker)) == []
        assert job.state.living == {0, 1, 2, 3}
        actions = [job.tell(ProcessExited(worker, code=0, time=0.0)) for worker in range(4)][-1]
        assert only(End, actions) == End(1, "the workers ended after iteration 7 of 20; see their logs")

    @pytest.mark.parametrize("how", ["trained", "ends_early", "stop"])
    def test_what_ends_a_job_in_order_before_that(self, how: str) -> None:
        job = Job()
        job.description = replace(job.description, train_iters=20, ends_early=how == "ends_early")
        job.start()
        if how == "stop":
            job.tell(StopRequest(signal=15, time=0.0))
        if how == "trained":
            job.tell(TrainingFinished(1, iteration=20))
        [end] = [action for worker in range(4) for action in job.tell(ScriptEnded(worker)) if isinstance(action, End)]
        assert end.code == (143 if how == "stop" else 0)
        by_flags = end.reason == "stopped by its own flags after iteration 0 of 20"
        assert by_flags == (how == "ends_early") and (end.reason == "finished") == (how == "trained")

    def test_standbys_and_dead_are_not_waited_for(self) -> None:
        job = Job().start().recover([0])
        assert job.state.plan is not None
        first, second = job.state.plan.working
        job.tell(ScriptEnded(first))
        assert only(End, job.tell(ProcessExited(second, code=0, time=0.0))).code == 0

    def test_a_worker_dies_on_its_way_out(self) -> None:
        """All others have saved and left with 0; nothing that was wanted of the dead one is missing."""
        job = Job().start()
        job.kill(2)
        job.tell(ScriptEnded(0))
        job.tell(ScriptEnded(1))
        assert only(End, job.tell(ScriptEnded(3))).code == 0

    @pytest.mark.parametrize("trained", [True, False])
    def test_the_last_worker_dies_on_its_way_out(self, trained: bool) -> None:
        """Likewise, if it dies after all others have left; not if they left before they had trained."""
        job = Job().start()
        if trained:
            job.tell(TrainingFinished(1, iteration=5))
        for worker in (0, 1, 3):
            job.tell(ScriptEnded(worker))
        assert only(End, job.kill(2)).code == (0 if trained else exit_codes.RETRY)

    def test_a_worker_that_has_said_goodbye_ends_while_others_recover(self) -> None:
        """They build an epoch without it: nothing is wrong with that."""
        job = Job().start()
        job.tell(ScriptEnded(0))
        job.kill(2)
        only(EpochPlan, job.report(1, 3))
        assert not job.tell(ProcessExited(0, code=0, time=0.0))
        assert job.state.phase is Phase.BUILDING

    def test_a_standby_that_loses_its_peers_while_they_build(self) -> None:
        """Training is over and they are not: without it no epoch comes about."""
        job = Job().start()
        job.tell(TrainingFinished(1, iteration=5))
        job.kill(0)
        job.report(1, 2, 3)
        [standby] = job.state.plan.standbys if job.state.plan else []
        assert EpochIsBroken in notices(job.tell(CommunicationFailed(standby, epoch=1, error="connection closed")))
        assert job.state.phase is Phase.REPORTING

    def test_standbys_suspect_those_who_leave(self) -> None:
        job = Job().start().recover([0])
        assert job.state.plan is not None
        (standby,) = job.state.plan.standbys
        job.tell(TrainingFinished(job.state.plan.working[0], iteration=5))
        answer = job.tell(CommunicationFailed(standby, epoch=1, error="connection closed by peer"))
        assert answer == [Notify(OthersFinish())]
        assert job.state.phase is Phase.RUNNING

    def test_a_worker_fails(self) -> None:
        """A user's bug is raised as in stock Megatron: no recovery."""
        actions = Job().start().tell(ScriptFailed(2, error="ValueError: x", code=1))
        end = only(End, actions)
        assert end.code == 1 and end.reason == "worker 2 failed: ValueError: x"
        assert events(actions, "worker_failed")[0].failed == 2
        assert EpochIsBroken not in notices(actions)

    def test_a_bad_exit_code(self) -> None:
        end = only(End, Job().start().tell(ProcessExited(2, code=3, time=0.0)))
        assert end.code == 1 and "exit code 3" in end.reason

    def test_a_stop_signal(self) -> None:
        job = Job().start()
        assert notices(job.tell(StopRequest(signal=signal.SIGTERM, time=0.0))) == [StopTraining]
        for worker in (0, 1, 2):
            assert not job.tell(ScriptEnded(worker))
        end = only(End, job.tell(ScriptEnded(3)))
        assert (end.code, end.reason) == (143, "stopped by signal 15")

    def test_a_stop_signal_outlives_a_recovery(self) -> None:
        job = Job().start()
        job.tell(StopRequest(signal=signal.SIGINT, time=0.0))
        job.recover([0])
        job.tell(ScriptEnded(1))
        assert only(End, job.tell(ScriptEnded(3))).code == 130

    def test_nobody_survives(self) -> None:
        job = Job(workers=2).start()
        job.kill(0)
        end = only(End, job.kill(1))
        assert end.code == exit_codes.RETRY and "no worker survived" in end.reason

    def test_nothing_happens_after_the_end(self) -> None:
        job = Job().start()
        job.tell(ScriptFailed(2, error="x", code=1))
        assert job.kill(1) == [] and job.report(0) == [] and job.wait(1e9) == []

    def test_nobody_waits_for_who_finished_while_others_report(self) -> None:
        """Worker 1 has left the loop and exits with 0 just as worker 0 dies."""
        job = Job().start()
        job.kill(0)
        job.report(2, 3)
        actions = job.tell(ScriptEnded(1))
        assert job.state.phase is not Phase.REPORTING
        assert only(EmergencyCheckpointOrder, actions).missing == (Shard(0, 3, 0, 1),)

    def test_who_finished_is_not_planned_with(self) -> None:
        job = Job().start()
        job.kill(3)
        job.report(0)
        job.tell(ScriptEnded(0))
        published = only(EpochPlan, job.report(1, 2))
        assert published.plan.members == (1, 2)

    def test_nobody_waits_for_who_finished_while_an_epoch_is_built(self) -> None:
        job = Job().start()
        job.kill(0)
        job.report(1, 2, 3)
        job.ready(1, 2)
        assert notices(job.tell(ProcessExited(3, code=0, time=0.0))) == [EpochIsBroken]
        assert only(EpochPlan, job.report(1, 2)).plan.members == (1, 2)


class TestAfterTraining:
    def test_a_death_is_recovered_from(self) -> None:
        job = Job().start()
        job.tell(TrainingFinished(1, iteration=5))
        job.kill(0)
        assert only(EpochPlan, job.report(1, 2, 3)).commit is not None

    def test_a_standby_that_loses_its_peers_waits_for_the_end(self) -> None:
        """The workers leave because they are done; that is no failure."""
        job = Job().start()
        job.kill(0)
        job.report(1, 2, 3)
        job.ready(1, 2, 3)
        [standby] = job.state.plan.standbys if job.state.plan else []
        job.tell(TrainingFinished(1, iteration=5))
        assert notices(job.tell(CommunicationFailed(standby, epoch=1, error="connection closed"))) == [OthersFinish]


class TestFailedLinks:
    """Nodes of two workers each that reach node 0, where the coordinator is, but not each other."""

    def fail(self, job: Job, *links: tuple[int, int]) -> list[Action]:
        """Node by node; all members report whom they have not reached."""
        waiting = sorted(job.state.living)
        timed_out = CommunicationFailed(waiting[0], job.state.epoch, "Timed out waiting 600000ms")
        broken = job.tell(timed_out)
        notice = next(each for each in broken if isinstance(each, Notify)).notice
        assert isinstance(notice, EpochIsBroken) and notice.probe
        actions: list[Action] = []
        for worker in waiting:
            others = {n for link in links if worker // 2 in link for n in link} - {worker // 2}
            lost = [peer for peer in waiting if peer // 2 in others]
            actions += job.report(worker, unreachable=lost)
        return actions

    def test_one_side_is_left_out_after_the_second_failure(self) -> None:
        job = Job(workers=6, micro_batches=12).start()
        before = job.state.plan
        assert only(EpochPlan, self.fail(job, (1, 2))).plan == before, "it may pass"
        actions = self.fail(job, (1, 2))
        why = "workers 2, 3 (node 1) and workers 4, 5 (node 2) can't reach each other"
        assert events(actions, "link_failed") == [LinkFailed(reason=why, left_out=(4, 5))]
        [given_up] = [each.notice for each in actions if isinstance(each, Notify)]
        assert isinstance(given_up, WorkersGivenUp) and given_up.workers == (4, 5) and given_up.for_good
        assert only(EpochPlan, actions).plan.members == (0, 1, 2, 3)
        job.ready(0, 1, 2, 3)
        assert job.state.phase is Phase.RUNNING and job.state.epoch == 2

    def test_the_side_that_costs_least(self) -> None:
        """Node 1 has lost a worker, and what it works with is gone, too."""
        job = Job(workers=8).start().recover([2])
        for _ in range(2):
            actions = self.fail(job, (1, 3))
        assert events(actions, "link_failed")[0].left_out == (3,)

    def test_a_node_that_is_cut_off_from_most(self) -> None:
        job = Job(workers=8, pipeline=1, micro_batches=24).start()
        for _ in range(2):
            actions = self.fail(job, (1, 2), (1, 3))
        assert [each.left_out for each in events(actions, "link_failed")] == [(2, 3)]
        assert only(EpochPlan, actions).plan.members == (0, 1, 4, 5, 6, 7)

    def test_workers_of_a_node_share_the_work_of_looking_for_others(self) -> None:
        """One has looked for the other node, and speaks for both: without it alone the other one fails as well."""
        job = Job(workers=6, micro_batches=12).start()
        for _ in range(2):
            job.tell(CommunicationFailed(0, epoch=job.state.epoch, error="Timed out waiting 600000ms"))
            lost = {3: [4, 5]}
            actions = [a for w in range(6) for a in job.report(w, unreachable=lost.get(w, []))]
        assert events(actions, "link_failed")[0].left_out == (4, 5)

    def test_with_a_death_counting_begins_anew(self) -> None:
        job = Job(workers=8).start()
        self.fail(job, (1, 2))
        job.kill(7)
        job.report(*sorted(job.state.living))
        assert not events(self.fail(job, (1, 2)), "link_failed")
        assert events(self.fail(job, (1, 2)), "link_failed")

    def test_no_plan_without_either(self) -> None:
        """All save, as where state is lost."""
        job = Job(workers=4, pipeline=4).start()
        for _ in range(2):
            actions = self.fail(job, (0, 1))
        assert not events(actions, "link_failed")
        order = only(EmergencyCheckpointOrder, actions)
        assert order.reason.endswith("can't reach each other, and there is no plan without either")
        assert set(order.writers) == {0, 1, 2, 3} and order.commit is not None


class TestTooFewWorkers:
    """The user pays for no fewer than --min-workers."""

    def test_survivors_save_and_end(self) -> None:
        """They have all state, and could go on."""
        job = Job(min_workers=3).start_with(**REPLICA_PER_NODE)
        job.recover([3])
        job.kill(2)
        order = only(EmergencyCheckpointOrder, job.report(0, 1))
        assert order.missing == () and order.writers == {0: (Shard(0, 3, 0, 1),), 1: (Shard(3, 6, 0, 1),)}
        job.tell(EmergencyCheckpointWritten(0))
        end = only(End, job.tell(EmergencyCheckpointWritten(1)))
        assert end.code == exit_codes.NO_PLAN
        assert end.reason == "no plan fits the survivors: 2 are left, fewer than --min-workers 3"

    def test_nodes_that_lose_each_other_save_where_neither_can_be_left_out(self) -> None:
        job = Job(workers=6, micro_batches=12, min_workers=5).start()
        for _ in range(2):
            actions = TestFailedLinks().fail(job, (1, 2))
        assert not events(actions, "link_failed")
        assert only(EmergencyCheckpointOrder, actions).reason.endswith("and there is no plan without either")

    def test_all_stop_in_order_when_a_node_leaves(self) -> None:
        job = Job(min_workers=3).start_with(**REPLICA_PER_NODE)
        assert notices(job.tell(LeaveRequest(node=1, agent=2, time=0.0))) == [StopTraining]
        [end] = [action for w in range(4) for action in job.tell(ScriptEnded(w)) if isinstance(action, End)]
        assert end.code == 143
        assert end.reason.endswith("there is no plan for the others: 2 are left, fewer than --min-workers 3")


class TestNoPlan:
    def lose_a_shard(self) -> tuple[Job, EmergencyCheckpointOrder]:
        job = Job().start()
        job.kill(2)
        job.kill(3)
        return job, only(EmergencyCheckpointOrder, job.report(0, 1))

    def test_survivors_write_what_they_hold(self) -> None:
        job, order = self.lose_a_shard()
        assert order.epoch == 1 and order.commit is not None and order.commit.iteration == 4
        assert order.writers == {0: (Shard(0, 3, 0, 1),)}, "one writer per shard"
        assert order.missing == (Shard(3, 6, 0, 1),)
        assert "stage 1 TP rank 0 is held by no survivor" in order.reason
        end = only(End, job.tell(EmergencyCheckpointWritten(0)))
        assert end.code == exit_codes.NO_PLAN
        assert "no plan fits the survivors: the state of stage 1 TP rank 0 is held by no survivor" in end.reason

    def test_the_step_that_is_saved_is_told_once(self) -> None:
        """Nobody goes on and would tell its loss."""
        job = Job().start()
        job.at[1] = (5, IterationPhase.AGREED)
        job.kill(2)
        job.kill(3)
        actions = job.report(0, 1)
        assert only(EmergencyCheckpointOrder, actions).commit.iteration == 5
        [step] = events(actions, "agreed")
        assert (step.iteration, step.epoch, step.loss) == (5, 0, {"lm loss": 2.0})

    def test_who_does_not_finish_writing_is_not_waited_for_forever(self) -> None:
        job, _ = self.lose_a_shard()
        assert not job.wait(49.0)
        assert only(End, job.wait(2.0)).code == exit_codes.NO_PLAN

    def test_a_writer_dies(self) -> None:
        job, _ = self.lose_a_shard()
        assert only(End, job.kill(0)).code == exit_codes.NO_PLAN

    def test_another_death_while_writing(self) -> None:
        job, _ = self.lose_a_shard()
        actions = job.kill(1)
        assert not [action for action in actions if isinstance(action, End | Notify)]
        assert only(End, job.tell(EmergencyCheckpointWritten(0))).code == exit_codes.NO_PLAN

    def test_nobody_holds_anything(self) -> None:
        job = Job(workers=2, pipeline=1).start()
        job.held[1] = ()
        job.kill(0)
        actions = job.report(1)
        assert only(EmergencyCheckpointOrder, actions).writers == {}
        assert only(End, actions).code == exit_codes.NO_PLAN, "there is nothing to wait for"

    def test_state_that_differs_between_holders(self) -> None:
        """Training another model silently is worse than ending."""
        job = Job().start()
        job.kill(0)
        job.report(1, 2, 3)
        job.ready(1, 2)
        actions = job.ready(3, state="other")
        order = only(EmergencyCheckpointOrder, actions)
        assert "state differs between holders of stage 1 TP rank 0" in order.reason
        assert not [action for action in actions if isinstance(action, Go)]
        assert notices(actions) == [EpochIsBroken], "members wait for Go and would not hear of the order"
        assert order.epoch == 2 and order.writers == {1: (Shard(0, 3, 0, 1),), 2: (Shard(3, 6, 0, 1),)}
        assert not job.tell(EmergencyCheckpointWritten(1))
        assert only(End, job.tell(EmergencyCheckpointWritten(2))).code == exit_codes.NO_PLAN

    def test_who_is_on_the_move_writes_what_it_still_holds(self) -> None:
        """Its plan says stage 1, but until Go its state is that of stage 0."""
        job = Job(workers=6, micro_batches=6).start()
        job.kill(4)
        job.kill(5)
        plan = only(EpochPlan, job.report(0, 1, 2, 3)).plan
        first = Shard(0, 3, 0, 1)
        wanted = spelled_out(plan, job.own)
        (mover,) = (w for w in plan.working if wanted.shards_of(w) != job.held[w])
        assert job.held[mover] == (first,)
        job.held.update({0: (first,), 1: (first,)})
        others = [worker for worker in plan.members if worker != mover]
        job.ready(*others)
        order = only(EmergencyCheckpointOrder, job.ready(mover, state="garbled on the way"))
        for worker, shard in order.writers.items():
            assert shard == job.held[worker]

    def test_nobody_knows_where_to_go_on(self) -> None:
        job = Job().start()
        job.kill(0)
        empty = Record(5, IterationPhase.COMPUTE)
        end = only(End, job.report(1, 2, 3, record=empty))
        assert end.code == exit_codes.RETRY and "no survivor knows" in end.reason


def plan_of(*replicas: tuple[Any, ...], counts: tuple[int, ...] = (2, 2)) -> ParallelPlan:
    """Replicas as (stages, chunks) or (stages,); by default two of two micro-batches each."""
    shares = deal(counts)
    return ParallelPlan(tuple(Replica(each[0], share, *each[1:]) for each, share in zip(replicas, shares, strict=True)))


OTHER_LAYERS = (Chunk(0, 0, 2), Chunk(1, 2, 6))
UNLIKE = plan_of((((0,), (2,)), OTHER_LAYERS), (((1,), (3,)), OTHER_LAYERS), counts=(3, 1))


class TestChangeByChoice:
    def test_from_the_question_to_go(self) -> None:
        job = Job().start()
        job.now = 10.0
        actions = job.apply(UNLIKE)
        answer = only(Reply, actions)
        assert answer.key == "answer/1" and "change 1 begins" in answer.answer.line
        assert "replica 0: layers 3, 3 → 2, 4" in answer.answer.changes
        [change] = events(actions, "plan_change")
        assert change.to_digest == UNLIKE.digest and change.changes == answer.answer.changes
        [notice] = [action.notice for action in actions if isinstance(action, Notify)]
        assert notice == PlanChange(1, 0, UNLIKE)
        assert job.state.phase is Phase.RUNNING
        job.now = 20.0
        actions = job.leave(0, 1, 2)
        assert not events(actions, "epoch_broken") and not notices(actions)
        published = only(EpochPlan, job.leave(3))
        assert (published.epoch, published.plan) == (1, UNLIKE)
        assert (published.commit.iteration, published.commit.replay) == (5, True)
        assert published.held[2] == (Shard(3, 6, 0, 1),)
        job.now = 20.25
        actions = job.ready(0, 1, 2, 3, steps_redone=0, bytes_received=3)
        only(Go, actions)
        assert not events(actions, "recovery")
        [done] = events(actions, "reconfiguration")
        assert (done.number, done.from_epoch, done.to_epoch) == (1, 0, 1)
        assert (done.stood_still_s, done.steps_redone, done.bytes_moved) == (0.25, 0, 12)

    @pytest.mark.parametrize("late", [None, 2], ids=["all", "all but one"])
    def test_groups_made_ahead_are_used_by_all_or_by_nobody(self, late: int | None) -> None:
        job = Job().start()
        job.apply(UNLIKE)
        for worker in {0, 1, 2, 3} - {late}:
            assert not job.tell(GroupsPrepared(worker, number=1))
        published = only(EpochPlan, job.leave(0, 1, 2, 3))
        assert published.groups_of_change == (1 if late is None else None)
        if late is not None:
            job.tell(GroupsPrepared(late, number=1))
        [done] = events(job.ready(*job.members), "reconfiguration")
        assert done.groups_made_ahead == (late is None)

    def test_groups_made_ahead_are_of_no_use_after_a_death(self) -> None:
        """The next change asks for others."""
        job = Job().start()
        job.apply(UNLIKE)
        for worker in range(4):
            job.tell(GroupsPrepared(worker, number=1))
        job.kill(3)
        assert only(EpochPlan, job.report(0, 1, 2)).groups_of_change is None
        job.ready(*job.members)
        job.apply(plan_of((((0,), (2,)), OTHER_LAYERS), counts=(4,)))
        for worker in job.members:
            job.tell(GroupsPrepared(worker, number=1))
        assert only(EpochPlan, job.leave(*job.members)).groups_of_change is None

    def test_there_and_back(self) -> None:
        job = Job().start()
        first = job.state.plan
        assert first is not None
        self.change(job, UNLIKE)
        self.change(job, spelled_out(first, job.own))
        assert job.state.plan == first, "in short again, so that Megatron's own groups run it"

    def change(self, job: Job, plan: ParallelPlan) -> None:
        only(Notify, job.apply(plan))
        only(EpochPlan, job.leave(*sorted(job.state.living)))
        only(Go, job.ready(*job.members))

    def test_who_gets_no_work_keeps_what_it_holds(self) -> None:
        job = Job().start()
        self.change(job, plan_of((((0,), (2,)),), counts=(4,)))
        assert job.state.plan is not None
        assert job.state.plan.standbys == {1: (0, 0), 3: (1, 0)}
        self.change(job, plan_of((((0,), (2,)), OTHER_LAYERS), counts=(4,)))
        assert job.state.plan.standbys == {1: (Shard(0, 3, 0, 1),), 3: (Shard(3, 6, 0, 1),)}

    @pytest.mark.parametrize(
        ("asked", "reason"),
        [
            (plan_of((((0,), (2,)),), (((1,), (3,)),)), "in force already"),
            (plan_of((((0,), (2,)), OTHER_LAYERS), (((1,), (4,)), OTHER_LAYERS)), "worker 4 can't work: not alive"),
            (plan_of((((0,), (2,)),), counts=(6,)), "6 micro-batches, the job has 4 in"),
            (plan_of((((0,), (2,)), (Chunk(0, 0, 2), Chunk(1, 2, 5))), counts=(4,)), "5 layers, the job 6"),
            (plan_of((((0, 1, 2),),), counts=(4,)), "doesn't fit the job"),
            ({"replicas": []}, "the plan lacks 'standbys'"),
            ({**UNLIKE.to_dict(), "uneven_shards": True}, "unequal shards"),
            ({"version": 3}, "a plan of version 3"),
            ([1], "this is not a plan"),
        ],
    )
    def test_what_is_refused(self, asked: Any, reason: str) -> None:
        job = Job().start()
        actions = job.apply(asked)
        assert reason in only(Reply, actions).answer.reason
        assert reason in events(actions, "change_refused")[0].reason
        assert not notices(actions) and job.state.phase is Phase.RUNNING
        self.change(job, UNLIKE)

    @pytest.mark.parametrize(
        ("degree", "changed", "reason"),
        [
            (3, {}, "3 TP members can't share 2 query groups; ask for stages of another number of members"),
            (4, {}, "4 TP members can't share 2 query groups"),
            (3, {"num_query_groups": 1}, "can't share 1 query groups"),
            (3, {"num_query_groups": 3, "padded_vocab_size": 256}, "can't share 256 vocabulary rows evenly"),
            (2, {}, None),
            (4, {"num_attention_heads": 8}, None),
        ],
    )
    def test_members_that_cannot_share_the_model(
        self, degree: int, changed: dict[str, Any], reason: str | None
    ) -> None:
        """Megatron takes more members than query groups where each has a part of one group, as many heads, and as many
        rows of weights for keys and values; of one group there are 16."""
        arguments = {
            "num_layers": 4, "hidden_size": 48, "ffn_hidden_size": 96, "num_attention_heads": 6, "swiglu": True,
            "group_query_attention": True, "num_query_groups": 2, "max_position_embeddings": 8,
            "padded_vocab_size": 192,
        }  # fmt: skip
        job = Job().start()
        job.tell(ModelBuilt(0, arguments=arguments | changed))
        answer = only(Reply, job.apply(plan_of(((tuple(range(degree)),), (Chunk(0, 0, 6),)), counts=(4,)))).answer
        assert isinstance(answer, Refused) == (reason is not None)
        assert reason is None or reason in answer.reason

    @pytest.mark.parametrize(
        ("memory", "host", "reason"),
        [
            (None, None, None),
            (20_000_000, None, None),
            (1_000_000, None, "while it changes, old and new state together take"),
            (1_000_000, 100_000, "while it changes, old and new state together take"),
            (1_000_000, 1_000_000, None),
            (200_000, 1_000_000, "memory exceeded on worker"),
        ],
    )
    def test_a_change_whose_old_and_new_state_do_not_fit_together(
        self, memory: int | None, host: int | None, reason: str | None
    ) -> None:
        """Nobody has to change, and a worker that runs out of memory ends the job. The host may have room for one."""
        arguments = {
            "num_layers": 4, "hidden_size": 48, "ffn_hidden_size": 96, "num_attention_heads": 6,
            "max_position_embeddings": 8, "padded_vocab_size": 192, "seq_length": 8, "micro_batch_size": 1,
        }  # fmt: skip
        job = Job()
        job.description = replace(job.description, device_memory=memory, host_memory=host)
        job.start()
        job.tell(ModelBuilt(0, arguments=arguments))
        answer = only(Reply, job.apply(plan_of((((0, 1),), (Chunk(0, 0, 6),)), counts=(4,)))).answer
        assert isinstance(answer, Refused) == (reason is not None), answer
        assert reason is None or reason in answer.reason

    def test_ops_that_would_wait_for_each_other_never_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Even if a plan's own rules were wrong about them: each stage is to compute first what needs the other."""
        job = Job().start()
        orders = ["F0.0 B0.0 F2.0 B2.0", "F2.1 B2.1 F0.1 B0.1"]
        asked = plan_of((((0,), (2,)), OTHER_LAYERS), (((1,), (3,)), OTHER_LAYERS)).to_dict()
        asked["replicas"][0]["schedule"] = {"name": "explicit", "orders": orders}
        monkeypatch.setattr(rules, "stuck_op", lambda *_: None)
        actions = job.apply(asked)
        refused = only(Reply, actions).answer.reason
        assert "ops don't fit together: op B0.0 waits for an op that waits for it" in refused and "\n" not in refused
        assert events(actions, "change_refused") and not notices(actions)
        assert not [action for action in actions if isinstance(action, EpochPlan)]
        self.change(job, UNLIKE)

    def test_one_change_at_a_time(self) -> None:
        job = Job().start()
        job.apply(UNLIKE)
        assert "change 1 is under way" in only(Reply, job.apply(UNLIKE)).answer.reason

    @pytest.mark.parametrize("state", ["starting", "waiting for survivors' reports", "building"])
    def test_no_change_while_there_is_no_training(self, state: str) -> None:
        job = Job()
        job.describe(0)
        if state != "starting":
            job.ready(0, 1, 2, 3)
            job.kill(0)
        if state == "building":
            job.report(1, 2, 3)
        assert f"is {state}" in only(Reply, job.apply(UNLIKE)).answer.reason

    def test_plans_that_are_due_in_a_recovery_are_taken_after_it(self) -> None:
        """Nobody asks for those of --resihp-plan again; and one after the other."""
        job = Job().start()
        job.kill(3)
        plans = plan_of((((0,), (2,)), OTHER_LAYERS), counts=(4,)), plan_of((((1,),), (Chunk(0, 0, 6),)), counts=(4,))
        for plan in plans:
            assert not job.apply(plan, patient=True)
        job.report(0, 1, 2)
        for number, plan in enumerate(plans, 1):
            actions = job.ready(*job.members)
            only(Go, actions)
            assert [change.number for change in events(actions, "plan_change")] == [number]
            job.leave(*job.members)
            assert job.state.plan is not None and job.state.plan.replicas == plan.replicas
        assert not events(job.ready(*job.members), "plan_change")

    @pytest.mark.parametrize("news", [TrainingFinished(1, 5), StopRequest(15, 0.0)])
    def test_no_change_shortly_before_the_end(self, news: Message) -> None:
        job = Job().start()
        job.tell(news)
        assert "about to end" in only(Reply, job.apply(UNLIKE)).answer.reason

    def test_a_death_before_anybody_has_left(self) -> None:
        job = Job().start()
        job.apply(UNLIKE)
        assert notices(job.kill(0)) == [EpochIsBroken]
        published = only(EpochPlan, job.report(1, 2, 3))
        assert published.plan.not_uniform is None and published.plan.members == (1, 2, 3)
        assert events(job.ready(1, 2, 3), "recovery")

    @pytest.mark.parametrize("dies_first", [True, False])
    def test_a_death_while_workers_leave(self, dies_first: bool) -> None:
        """Who has reported waits for the next plan and does not report again."""
        job = Job().start()
        job.apply(UNLIKE)
        job.leave(1)
        actions = job.kill(0) if dies_first else job.tell(CommunicationFailed(2, epoch=0, error="connection reset"))
        assert notices(actions) == [EpochIsBroken] and events(actions, "epoch_broken")
        job.kill(0)
        published = only(EpochPlan, job.leave(2, 3))
        assert published.plan.not_uniform is None and published.plan.members == (1, 2, 3)
        [recovery] = events(job.ready(1, 2, 3), "recovery")
        assert recovery.broken_at == job.now

    def test_who_does_not_leave_is_interrupted_and_then_given_up(self) -> None:
        """It may evaluate or save after the step, which others are done with or have no part in."""
        job = Job().start()
        job.apply(UNLIKE)
        assert not job.wait(1000.0), "an iteration may last"
        job.leave(0, 1, 2)
        assert not job.wait(LIMITS.leave_s - 1.0)
        actions = job.wait(2.0)
        assert notices(actions) == [EpochIsBroken] and not events(actions, "worker_dead")
        assert "not all have left for change 1" in events(actions, "epoch_broken")[0].cause
        assert not job.wait(9.0)
        actions = job.wait(2.0)
        assert events(actions, "worker_dead")[0].cause == "did not report within 10 s"
        assert only(EpochPlan, actions).plan.members == (0, 1, 2)

    def test_a_death_while_the_new_plan_is_built(self) -> None:
        job = Job().start()
        job.apply(UNLIKE)
        job.leave(0, 1, 2, 3)
        job.ready(0, 1)
        job.now = 30.0
        assert notices(job.kill(3)) == [EpochIsBroken]
        published = only(EpochPlan, job.report(0, 1, 2))
        assert published.plan.not_uniform is None and published.epoch == 2
        assert published.held == {0: (Shard(0, 3, 0, 1),), 1: (Shard(0, 3, 0, 1),), 2: (Shard(3, 6, 0, 1),)}
        [recovery] = events(job.ready(0, 1, 2), "recovery")
        assert recovery.broken_at == 30.0

    def test_state_that_differs_after_the_move_leads_back(self) -> None:
        """What was held before is still there: no reason to end the job."""
        job = Job().start()
        job.apply(UNLIKE)
        job.leave(0, 1, 2, 3)
        job.ready(0, 1, 2)
        actions = job.ready(3, state="garbled on the way")
        assert notices(actions) == [EpochIsBroken]
        assert "layer 2" in events(actions, "epoch_broken")[0].cause
        published = only(EpochPlan, job.report(0, 1, 2, 3))
        assert published.plan.not_uniform is None
        only(Go, job.ready(0, 1, 2, 3))

    def test_a_failure_under_a_plan_of_unlike_stages(self) -> None:
        """Nobody holds a shard of the job's own layout, but all state is there."""
        job = Job().start()
        self.change(job, UNLIKE)
        job.kill(3)
        plan = only(EpochPlan, job.report(0, 1, 2)).plan
        assert plan.not_uniform is None and len(plan.working) == 2
        assert events(job.ready(*job.members), "recovery")

    def test_changes_are_no_recoveries(self) -> None:
        job = Job().start()
        first = job.state.plan
        assert first is not None
        for _ in range(LIMITS.recoveries_per_iteration):
            self.change(job, UNLIKE)
            self.change(job, first)


class TestLateNodes:
    """Two nodes of two workers begin the job, PP 2 x DP 2; nodes 2 and 3, of workers 4 to 7, may join."""

    def job(self, micro_batches: int = 4) -> Job:
        return Job(micro_batches=micro_batches, late_nodes=2)

    def test_nodes_may_join_as_soon_as_the_job_trains(self) -> None:
        job = self.job()
        job.describe(0)
        assert not [each for each in job.ready(0, 1, 2) if isinstance(each, Reopen)]
        opened = [each for each in job.ready(3) if isinstance(each, Reopen)]
        assert opened == [Reopen(2, (4, 5)), Reopen(3, (6, 7))]
        job.recover([3])
        assert len([each for each in job.actions if isinstance(each, Reopen)]) == 2, "offered once"

    def test_those_that_never_come_change_nothing(self) -> None:
        job, plain = self.job().start().recover([3]), Job().start().recover([3])
        assert job.state.plan == plain.membership.state.plan and job.state.dead == plain.membership.state.dead

    def test_a_node_makes_another_replica(self) -> None:
        """Of one worker nothing can be made yet."""
        job = self.job().start()
        assert not notices(job.come_back(4))
        [change] = events(job.come_back(5), "plan_change")
        assert change.why == "workers 4, 5 joined"
        published = only(EpochPlan, job.leave(0, 1, 2, 3))
        assert [len(each.micro_batches) for each in published.plan.replicas] == [2, 1, 1]
        assert published.plan.replicas[2].stages == ((4,), (5,)) and published.held[4] == ()
        only(Go, job.ready(*job.members))
        assert [event.resumed_iteration for event in events(job.actions, "reconfiguration")] == [5]

    def test_it_waits_where_each_replica_has_one_micro_batch(self) -> None:
        job = self.job(micro_batches=2).start()
        assert not notices([*job.come_back(4), *job.come_back(5)])
        published = only(EpochPlan, [*job.kill(3), *job.report(0, 1, 2)])
        assert published.plan.working and 4 not in published.plan.members

    def test_it_is_lost_again_and_comes_back(self) -> None:
        job = self.job().start()
        self.take_in(job, 4, 5)
        lost = job.tell(NodeLost(node=2, cause="gone", time=0.0))
        assert only(Reopen, lost) == Reopen(2, (12, 13))
        assert only(EpochPlan, job.report(0, 1, 2, 3)).plan.members == (0, 1, 2, 3)
        job.ready(0, 1, 2, 3)
        self.take_in(job, 12, 13)
        assert events(job.actions, "plan_change")[-1].why == "workers 12, 13 came back"

    def test_it_is_lost_before_its_workers_were_ready(self) -> None:
        """The job has not even begun to count on them."""
        job = self.job().start()
        lost = job.tell(NodeLost(node=2, cause="gone", time=0.0))
        assert lost == [Reopen(2, (12, 13))] and job.state.phase is Phase.RUNNING

    @pytest.mark.parametrize("said", ["a word", "nothing"])
    def test_its_workers_fail_again_and_again(self, said: str) -> None:
        """Each time it may come with ids that nobody has had, whether or not these were heard of."""
        job = self.job().start()
        for worker, offered in ((4, (12, 13)), (12, (20, 21)), (20, (28, 29))):
            if said == "a word":
                job.tell(ScriptFailed(worker, error="refused", code=2))
            assert only(Reopen, job.tell(NodeLost(node=2, cause="gone", time=0.0))) == Reopen(2, offered)

    def test_who_fails_before_it_is_taken_in_ends_nothing(self) -> None:
        job = self.job().start()
        job.come_back(4)
        [died] = events(job.tell(ScriptFailed(4, error="no such file", code=1)), "worker_dead")
        assert died.cause == "failed before it was taken in: no such file"
        assert job.state.phase is Phase.RUNNING

    def test_it_takes_the_place_of_who_died_and_is_joined_by_who_comes_back(self) -> None:
        """Not the first plan again, which has no work for it."""
        job = self.job().start().recover([3])
        self.take_in(job, 4)
        assert job.state.plan is not None and len(job.state.plan.replicas) == 2
        assert not notices(job.come_back(11)), "alone it makes no replica"
        [change] = events(job.come_back(6), "plan_change")
        assert change.why == "worker 11 came back, worker 6 joined"

    def take_in(self, job: Job, *workers: int) -> None:
        for worker in workers:
            job.come_back(worker)
        only(EpochPlan, job.leave(*sorted(job.state.living)))
        only(Go, job.ready(*job.members))


class TestComingBack:
    """Worker 7 is worker 3, started anew."""

    def test_from_the_restart_to_the_first_plan(self) -> None:
        job = Job().start()
        first = job.state.plan
        assert first is not None
        job.recover([3])
        assert events(job.tell(WorkerRestarted(7, 3, 0.0)), "worker_restarted")[0].restarted == 7
        actions = job.come_back(7)
        assert events(actions, "worker_waiting")[0].place == 3
        [change] = events(actions, "plan_change")
        assert change.why == "worker 7 came back"
        assert notices(actions) == [PlanChange] and job.state.phase is Phase.RUNNING
        assert not notices(job.leave(0, 1)), "workers stand still, as for any change"
        actions = job.leave(2)
        published = only(EpochPlan, actions)
        assert published.plan == renamed(first, lambda worker: 7 if worker == 3 else worker)
        assert published.groups_of_change is None, "worker 7 has none yet, whatever others have"
        assert published.held[7] == () and published.held[2] == (Shard(3, 6, 0, 1),)
        assert only(Notify, actions).notice == WorkersTakenIn(2, (7,))
        assert not job.ready(0, 1, 2)
        actions = job.ready(7, bytes_received=5)
        assert events(actions, "reconfiguration") and not events(actions, "recovery")
        assert job.state.phase is Phase.RUNNING and not job.state.joining.waiting

    def test_it_dies_again_and_comes_back_again(self) -> None:
        job = Job().start().recover([3])
        self.take_in(job, 7)
        job.recover([7])
        self.take_in(job, 11)
        assert job.members == (0, 1, 2, 11) and job.state.plan is not None
        assert len(job.state.plan.replicas) == 2

    def take_in(self, job: Job, worker: int) -> None:
        job.come_back(worker)
        only(EpochPlan, job.leave(*sorted(job.state.living)))
        only(Go, job.ready(*job.members))

    def test_two_come_back_one_by_one(self) -> None:
        """Of TP 2 x DP 3, one of each of two replicas: the first to be back waits for the second."""
        job = Job(6, pipeline=1, tensor=2, micro_batches=6).start().recover([3, 5])
        assert not notices(job.come_back(9)), "worker 2 or 4 can form a replica with worker 9"

    def test_who_comes_back_while_others_recover_is_taken_in_afterwards(self) -> None:
        job = Job().start()
        job.kill(3)
        assert not notices(job.come_back(7))
        published = only(EpochPlan, job.report(0, 1, 2))
        assert published.plan.members == (0, 1, 2)
        assert notices(job.ready(0, 1, 2)) == [PlanChange]

    def test_nobody_waits_for_who_dies_before_others_have_heard_of_it(self) -> None:
        job = Job().start().recover([3])
        running = job.state.plan
        assert not [action for action in job.kill(7) if not isinstance(action, Log)]
        assert job.come_back(7) == [], "the dead are not heard"
        assert (job.state.phase, job.state.plan) == (Phase.RUNNING, running)

    @pytest.mark.parametrize("left", [(), (0, 1)])
    def test_others_go_on_as_before_if_it_dies_before_it_is_taken_in(self, left: tuple[int, ...]) -> None:
        job = Job().start().recover([3])
        before = job.state.plan
        job.come_back(7)
        job.leave(*left)
        assert not notices(job.kill(7))
        published = only(EpochPlan, job.leave(*sorted({0, 1, 2} - set(left))))
        assert published.plan == before and 7 not in published.held
        only(Go, job.ready(0, 1, 2))

    def test_others_go_on_as_before_if_it_dies_while_the_plan_is_built(self) -> None:
        job = Job().start().recover([3])
        before = job.state.plan
        job.come_back(7)
        job.leave(0, 1, 2)
        job.ready(0, 1)
        assert notices(job.kill(7)) == [EpochIsBroken]
        assert only(EpochPlan, job.report(0, 1, 2)).plan == before
        only(Go, job.ready(0, 1, 2))

    @pytest.mark.parametrize("told", [ScriptFailed(7, "ImportError: x", 1), ProcessExited(7, 1, 0.0), ScriptEnded(7)])
    @pytest.mark.parametrize("called", [False, True])
    def test_its_own_errors_end_no_job_before_it_was_taken_in(self, told: Message, called: bool) -> None:
        job = Job().start().recover([3])
        job.come_back(7)
        if called:
            job.leave(0, 1, 2)
        actions = job.tell(told)
        assert events(actions, "worker_dead")[0].dead == 7
        assert not [action for action in actions if isinstance(action, End)]

    def test_its_errors_end_the_job_afterwards(self) -> None:
        job = Job().start().recover([3])
        self.take_in(job, 7)
        assert only(End, job.tell(ScriptFailed(7, error="ValueError: x", code=1))).code == 1

    def test_a_failure_before_it_is_taken_in(self) -> None:
        """The others recover without it; then it is asked for again."""
        job = Job().start().recover([3])
        job.come_back(7)
        job.leave(0, 1)
        assert notices(job.tell(CommunicationFailed(2, epoch=1, error="connection reset"))) == [EpochIsBroken]
        assert only(EpochPlan, job.leave(2)).plan.members == (0, 1, 2)
        assert notices(job.ready(*job.members)) == [PlanChange]

    def test_another_death_while_the_plan_with_it_is_built(self) -> None:
        """It is a survivor that holds nothing."""
        job = Job(6, micro_batches=6).start().recover([5])
        job.come_back(11)
        job.leave(0, 1, 2, 3, 4)
        job.kill(4)
        published = only(EpochPlan, job.report(0, 1, 2, 3, 11))
        assert published.held[11] == () and 11 in published.plan.standbys
        only(Go, job.ready(*job.members))

    def test_a_stranger_is_sent_away(self) -> None:
        """Its script has been changed meanwhile: what it would train is another model."""
        job = Job().start().recover([3])
        actions = job.come_back(7, micro_batches=8)
        [notice] = [action.notice for action in actions if isinstance(action, Notify)]
        assert isinstance(notice, WorkerDismissed) and notice.worker == 7
        assert not job.state.joining.waiting and job.state.phase is Phase.RUNNING

    def test_shortly_before_the_end_nobody_waits_for_it(self) -> None:
        job = Job().start().recover([3])
        assert job.state.plan is not None
        working = job.state.plan.working
        job.tell(TrainingFinished(working[0], iteration=5))
        assert not notices(job.come_back(7))
        job.tell(ScriptEnded(working[0]))
        assert only(End, job.tell(ScriptEnded(working[1]))).code == 0

    def test_its_node_is_lost(self) -> None:
        job = Job().start().recover([3])
        self.take_in(job, 7)
        actions = job.tell(NodeLost(node=1, cause="gone", time=0.0))
        assert [event.dead for event in events(actions, "worker_dead")] == [2, 7]
        assert only(Reopen, actions) == Reopen(1, (6, 11)), "ids that nobody has had"

    def test_a_plan_by_hand_can_give_it_work(self) -> None:
        job = Job().start_with(strategy="joint").recover([3])
        assert not notices(job.come_back(7, strategy="joint")), "the replanner will say what it is to do"
        job.apply(plan_of((((0,), (2,)), OTHER_LAYERS), (((1,), (7,)), OTHER_LAYERS), counts=(3, 1)))
        actions = job.leave(0, 1, 2)
        assert only(EpochPlan, actions).plan.working == (0, 2, 1, 7)
        assert notices(actions) == [WorkersTakenIn]

    def test_complete_replicas_give_it_work_where_its_strategy_has_no_plan(self) -> None:
        job = Job().start_with(strategy="joint").recover([3])
        job.come_back(7, strategy="joint")
        [change] = job.apply(None, answer=None, patient=True)[1:]
        assert isinstance(change, Notify) and 7 in change.notice.plan.working, "its strategy has no plan"

    def test_nobody_else_may_leave_the_plan_to_the_coordinator(self) -> None:
        job = Job().start_with(strategy="joint").recover([3])
        job.come_back(7, strategy="joint")
        assert not notices(job.apply(None))

    def test_a_worker_that_completes_no_replica_goes_on_waiting(self) -> None:
        job = Job(workers=6, micro_batches=6).start_with(strategy="joint").recover([4, 5])
        job.come_back(10, strategy="joint")
        [refused] = events(job.apply(None, answer=None, patient=True), "change_refused")
        assert refused.reason == "uniform plans have no work for them"


REPLICA_PER_NODE = {"pipeline_last": False}
"""Two workers on each node, which are a replica together."""


class TestLeaving:
    """A node other than node 0 is told to end."""

    def leave(self, job: Job, node: int) -> list[Action]:
        return job.tell(LeaveRequest(node=node, agent=2 * node, time=0.0))

    def test_its_workers_are_planned_around_after_a_step(self) -> None:
        job = Job().start_with(**REPLICA_PER_NODE)
        begun = self.leave(job, 1)
        assert notices(begun) == [PlanChange]
        assert events(begun, "plan_change")[0].why == "node 1 leaves"
        left = job.leave(0, 1, 2, 3)
        published = only(EpochPlan, left)
        assert published.plan.members == (0, 1) and published.held.keys() == {0, 1} and published.leaving == (2, 3)
        assert [notice for action in left if isinstance(action, Notify) for notice in [action.notice]] == [
            NodeReleased(2, (2, 3))
        ]
        assert not job.tell(ProcessExited(2, code=0, time=job.now)) and not job.tell(ScriptEnded(3))
        done = job.ready(0, 1)
        assert events(done, "reconfiguration")[0].steps_redone == 1 and not events(done, "recovery")
        gone = job.tell(NodeLost(node=1, cause="connection lost", time=job.now))
        assert gone == [Reopen(1, (6, 7))], "nobody has died, and the node may come back"

    def test_where_no_plan_is_left_all_stop(self) -> None:
        """The second stage is nowhere else."""
        job = Job().start()
        assert notices(self.leave(job, 1)) == [StopTraining]
        [end] = [action for w in range(4) for action in job.tell(ScriptEnded(w)) if isinstance(action, End)]
        assert end.code == 143
        assert end.reason.startswith("told to leave: node 1; there is no plan for the others: the state of")

    def test_when_all_are_told_to_end_nobody_is_planned_around(self) -> None:
        job = Job().start_with(**REPLICA_PER_NODE)
        job.tell(StopRequest(signal=signal.SIGTERM, time=0.0))
        assert not self.leave(job, 1)
        [end] = [action for w in range(4) for action in job.tell(ScriptEnded(w)) if isinstance(action, End)]
        assert end.code == 143

    def test_during_start_up_the_job_ends(self) -> None:
        job = Job()
        job.describe(0)
        assert only(End, self.leave(job, 1)).code == 143

    def test_a_death_on_the_way_makes_it_a_recovery_without_them(self) -> None:
        job = Job(workers=6, micro_batches=6).start_with(**REPLICA_PER_NODE)
        self.leave(job, 2)
        job.leave(0)
        job.kill(1)
        actions = job.report(2, 3, 4, 5)
        published = only(EpochPlan, actions)
        assert published.plan.working == (2, 3) and published.leaving == (4, 5)
        assert notices(actions) == [NodeReleased]
        [recovery] = events(job.ready(*job.members), "recovery")
        assert recovery.dead == (1,)

    def test_a_node_that_is_told_during_a_recovery_has_no_part_in_the_next_plan(self) -> None:
        job = Job(workers=6, micro_batches=6).start_with(**REPLICA_PER_NODE)
        job.kill(1)
        self.leave(job, 2)
        assert only(EpochPlan, job.report(0, 2, 3, 4, 5)).leaving == (4, 5)

    def test_a_change_that_is_under_way_comes_first(self) -> None:
        job = Job(workers=6, micro_batches=6).start_with(**REPLICA_PER_NODE)
        assert job.state.plan is not None
        one, two, three = job.state.plan.replicas
        shares = zip((one, two, three), deal((3, 2, 1)), strict=True)
        job.apply(ParallelPlan(tuple(replace(replica, micro_batches=share) for replica, share in shares)))
        assert not self.leave(job, 2)
        job.leave(*range(6))
        assert notices(job.ready(*job.members)) == [PlanChange]
        assert only(EpochPlan, job.leave(*range(6))).leaving == (4, 5)

    def test_two_nodes_one_after_the_other(self) -> None:
        job = Job(workers=6, micro_batches=6).start_with(**REPLICA_PER_NODE)
        self.leave(job, 1)
        job.wait(3.0)
        self.leave(job, 2)
        assert only(EpochPlan, job.leave(*range(6))).leaving == (2, 3, 4, 5)

    def test_a_node_whose_workers_are_in_no_plan_leaves_at_once(self) -> None:
        job = Job(late_nodes=1).start_with(**REPLICA_PER_NODE)
        job.come_back(4)
        assert notices(self.leave(job, 2)) == [NodeReleased]
        assert not job.state.joining.waiting


class TestWhateverHappens:
    """Any sequence of deaths, errors, reports and delays ends in training or in an end that is said."""

    @settings(max_examples=200)
    @given(data=st.data())
    def test_it_ends_well_or_loudly(self, data: st.DataObject) -> None:
        replicas = data.draw(st.integers(1, 3))
        pipeline, tensor = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
        workers = replicas * pipeline * tensor
        job = Job(workers, pipeline, tensor, micro_batches=2 * replicas).start()
        for _ in range(data.draw(st.integers(1, 25))):
            self._something_happens(job, data)
            self._check(job)
        for _ in range(100):
            if job.state.phase in (Phase.RUNNING, Phase.ENDED):
                break
            self._do_what_is_told(job)
            self._check(job)
        assert job.state.phase in (Phase.RUNNING, Phase.ENDED)
        if job.state.phase is Phase.RUNNING:
            assert job.state.plan is not None and not set(job.members) & set(job.state.dead)

    def _something_happens(self, job: Job, data: st.DataObject) -> None:
        if job.state.phase is Phase.RUNNING and data.draw(st.booleans()):
            job.iteration += 1
        size = job.state.job.size.workers
        worker = data.draw(st.integers(0, size - 1))
        if worker + size in job.held:  # started anew
            worker += size
        epoch = max(0, job.state.epoch - data.draw(st.integers(0, 1)))
        happenings = ["report", "ready"] * 5 + [
            "suspect", "kill", "silent", "node", "wait", "apply", "come back", "drain", "down"
        ]  # fmt: skip
        match data.draw(st.sampled_from(happenings)):
            case "come back":
                if worker in job.state.dead and worker < size:
                    job.come_back(worker + size)
            case "down":
                job.tell(NodesDown((worker % size // 2,), time=job.now))
            case "drain":
                job.tell(DrainRequest((), (worker,), data.draw(st.sampled_from([0.5, 500.0]))))
            case "apply":
                job.apply(self._any_plan(job, data))
            case "report":
                agreed = data.draw(st.sampled_from([IterationPhase.REDUCED, IterationPhase.AGREED]))
                if job.state.phase is Phase.RUNNING:
                    job.at = {each: (job.iteration, IterationPhase.REDUCED) for each in job.members}
                    job.at[worker] = (job.iteration, agreed)
                if worker in job.held:
                    job.report(worker, epoch=epoch)
            case "ready":
                state = data.draw(st.sampled_from(["same"] * 9 + ["other"]))
                job.ready(worker, epoch=epoch, state=state)
            case "suspect":
                job.tell(CommunicationFailed(worker, epoch=epoch, error="connection reset by peer"))
            case "kill":
                job.kill(worker)
            case "silent":
                job.tell(HeartbeatsMissing(worker, silence_s=6.0, time=job.now))
            case "node":
                job.tell(NodeLost(node=worker % size // 2, cause="gone", time=job.now))
            case "wait":
                job.wait(data.draw(st.sampled_from([1.0, 200.0])))

    def _any_plan(self, job: Job, data: st.DataObject) -> ParallelPlan:
        """One pipeline of some of the living with a cut somewhere."""
        living = sorted(job.state.living) or [0]
        layers = job.own[-1].end
        cut = data.draw(st.integers(1, layers - 1))
        first, *rest = living
        stages, chunks = ((first,), tuple(rest[:2])), (Chunk(0, 0, cut), Chunk(1, cut, layers))
        if not rest:
            stages, chunks = ((first,),), (Chunk(0, 0, layers),)  # type: ignore[assignment]
        return ParallelPlan((Replica(stages, tuple(range(job.description.micro_batches)), chunks),))

    def _do_what_is_told(self, job: Job) -> None:
        membership = job.membership
        match membership.state.phase:
            case Phase.REPORTING if membership.state.reports.accounts.waiting:
                job.tell(NodesDown((), job.now))
                job.wait(LIMITS.word_s)
            case Phase.REPORTING:
                job.report(*sorted(membership.state.living))
            case Phase.BUILDING:
                job.ready(*job.members)
            case Phase.SAVING:
                order = next(action for action in job.actions if isinstance(action, EmergencyCheckpointOrder))
                for worker in order.writers:
                    job.tell(EmergencyCheckpointWritten(worker))

    def _check(self, job: Job) -> None:
        plans = [action for action in job.actions if isinstance(action, EpochPlan | EmergencyCheckpointOrder)]
        assert [action.epoch for action in plans] == list(range(len(plans))), "one plan or order for each epoch"
        commits = [action.commit.iteration for action in plans if action.commit is not None]
        assert commits == sorted(commits), "what was applied stays applied"
        went = [action.epoch for action in job.actions if isinstance(action, Go)]
        assert went == sorted(set(went))
        ends = [index for index, action in enumerate(job.actions) if isinstance(action, End)]
        assert ends in ([], [len(job.actions) - 1]), "the end is one, and the last"
        assert not any(isinstance(action, Go | EpochPlan) for action in self._after_order(job.actions))

    def _after_order(self, actions: list[Action]) -> list[Action]:
        orders = [n for n, action in enumerate(actions) if isinstance(action, EmergencyCheckpointOrder)]
        return actions[orders[0] if orders else len(actions) :]

    @given(data=st.data())
    def test_go_only_when_every_member_is_ready(self, data: st.DataObject) -> None:
        job = Job().start()
        job.kill(0)
        job.report(1, 2, 3)
        told: set[int] = set()
        for worker in data.draw(st.lists(st.sampled_from([1, 2, 3]), max_size=8)):
            epoch = data.draw(st.sampled_from([0, 1, 2]))
            before = job.state.phase
            went = [action for action in job.ready(worker, epoch=epoch) if isinstance(action, Go)]
            if epoch == 1 and before is Phase.BUILDING:
                told.add(worker)
            assert bool(went) == (told == {1, 2, 3} and before is Phase.BUILDING)


class TestDistributedOptimizer:
    """Three replicas of one worker each: a part of the optimizer is with its owner, its copy with the next worker."""

    def start(self) -> Job:
        job = Job(workers=3, pipeline=1, micro_batches=3)
        job.description = replace(job.description, distributed_optimizer=True)
        return job.start()

    def test_the_loss_of_an_owner_leaves_the_copy(self) -> None:
        job = self.start().recover([1])
        assert job.state.plan is not None
        assert job.state.plan.working == (0, 2)

    def test_the_loss_of_both_ends_the_job(self) -> None:
        """The survivor has parameters of everything, and would train another model with them."""
        job = self.start()
        job.kill(0)
        job.kill(1)
        order = only(EmergencyCheckpointOrder, job.report(2))
        assert "died with its copy" in order.reason
        assert order.missing == (Shard(0, 3, 0, 1),) and order.writers == {2: (Shard(0, 3, 0, 1),)}

    def test_each_survivor_writes_its_part(self) -> None:
        job = Job(workers=4, pipeline=1)
        job.description = replace(job.description, distributed_optimizer=True)
        job.start()
        job.kill(0)
        job.kill(1)
        assert set(only(EmergencyCheckpointOrder, job.report(2, 3)).writers) == {2, 3}

    def test_what_was_kept_before_go_counts_until_then(self) -> None:
        """Workers 0 and 2 are neighbours in the new ring, which does not hold yet."""
        job = Job(workers=4, pipeline=1)
        job.description = replace(job.description, distributed_optimizer=True)
        job.start()
        job.kill(1)
        job.report(0, 2, 3)
        job.kill(3)
        assert only(EpochPlan, job.report(0, 2)).plan.working == (0, 2)

    def unlike(self) -> ParallelPlan:
        chunks = (Chunk(0, 0, 1), Chunk(1, 1, 3))
        return plan_of((((0,), (1,)), chunks), (((2,),), (Chunk(0, 0, 3),)), counts=(2, 1))

    def test_who_has_a_part_only_keeps_nothing_beside_unlike_replicas(self) -> None:
        job = Job(workers=4, pipeline=1, micro_batches=4)
        job.description = replace(job.description, distributed_optimizer=True)
        job.start()
        one = plan_of((((0,), (1,)), (Chunk(0, 0, 1), Chunk(1, 1, 3))), counts=(4,))
        job.apply(one)
        assert only(EpochPlan, job.leave(0, 1, 2, 3)).plan.standbys == {2: None, 3: None}

    def test_unlike_replicas_have_no_parts(self) -> None:
        """Under such a plan all holders have all of the state, so that any one of them is enough."""
        job = self.start()
        job.apply(self.unlike())
        job.leave(0, 1, 2)
        job.ready(0, 1, 2)
        job.kill(0)
        job.kill(1)
        assert only(EpochPlan, job.report(2)).plan.working == (2,)
