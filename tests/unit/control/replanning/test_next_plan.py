# SPDX-License-Identifier: Apache-2.0
"""Who plans for survivors: a strategy where its plan can be run, complete uniform replicas otherwise, and why."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from megatron_resihp.control.coordination.epoch_events import job_described
from megatron_resihp.control.replanning.change import ChangeRefused, plan_to_change_to
from megatron_resihp.control.replanning.job_facts import JobFacts
from megatron_resihp.control.replanning.modes import mode_of
from megatron_resihp.control.replanning.processes.planning import answer
from megatron_resihp.control.replanning.recovery.inventory import Survivors, shape_of
from megatron_resihp.control.replanning.recovery.next_plan import Heard, StrategicPlan, dealt_anew, uniform_plan
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.model.layers import Model, model_from_arguments
from megatron_resihp.cost.training import Training, training_from_arguments, training_of_job
from megatron_resihp.events.replanning import Planned
from megatron_resihp.plan import (
    Chunk,
    Coordinate,
    OwnSplit,
    ParallelPlan,
    PlanError,
    PlannedOp,
    Replica,
    Schedule,
    Shard,
    even_chunks,
    rules,
    spelled_out,
)
from megatron_resihp.plan.schedule import EXPLICIT
from megatron_resihp.planner import JobShape, NoPlanError, initial_plan, plan_uniform
from megatron_resihp.planner.job_shape import sharings
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.planning import KnownJob, NoPlan, PlanFound, PlannerAnswer, PlannerRequest

OWN = even_chunks(4, 2)
SHAPE = JobShape(tensor_parallel=1, pipeline_parallel=2, micro_batches=4, workers_per_node=4)
START = initial_plan(SHAPE, 4)
ARGUMENTS = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64,
    "padded_vocab_size": 256, "micro_batch_size": 1,
}  # fmt: skip
JOB = JobDescription(
    strategy="joint", chunks=OWN, micro_batches=4, tensor_parallel=1, pipeline_parallel=2, emulated="a100",
    seq_length=64, sequence_parallel=False, pipeline_last=True,
)  # fmt: skip
KNOWN = KnownJob.of(JOB, ARGUMENTS)
TOO_LITTLE = NoPlan("too little memory")
NUMBERS = {"planning_s": 0.1, "waited_s": 0.2, "made_ahead": False, "iteration_s": 1.0, "bound_s": 0.9, "moving_s": 2.0}


def survivors(*workers: int, running: ParallelPlan | None = START, **job: Any) -> Survivors:
    full = spelled_out(START, OWN)
    held = {worker: full.shards_of(worker) for worker in workers}
    return Survivors(SHAPE, OWN, held, START, running, replace(JOB, **job), ARGUMENTS, 4)


def found(plan: ParallelPlan) -> PlanFound:
    return PlanFound(
        plan, planning_s=0.1, iteration_s=1.0, current_s=None, healthy_s=1.0, moving_s=2.0, sending_s=0.0, bound_s=0.9
    )


def strategic(answer: PlannerAnswer) -> StrategicPlan:
    return StrategicPlan(lambda strategy, survivors, running, timeout_s: Heard(answer, made_ahead=False, waited_s=0.2))


UNLIKE = ParallelPlan((Replica(((2,), (1, 3)), (0, 1, 2, 3), (Chunk(0, 0, 2), Chunk(1, 2, 6))),))


def test_a_strategys_plan_is_taken() -> None:
    plan, told = strategic(found(UNLIKE))(survivors(1, 2, 3))
    assert plan == UNLIKE
    assert told == [Planned(strategy="joint", **NUMBERS)]


class TestLargerBatches:
    """All live, and what was run is for batches of four micro-batches."""

    def survivors(self, running: ParallelPlan) -> Survivors:
        held = {worker: spelled_out(running, OWN).shards_of(worker) for worker in running.members}
        shape, job = replace(SHAPE, micro_batches=8), replace(JOB, micro_batches=8)
        return Survivors(shape, OWN, held, running, running, job, ARGUMENTS, 4)

    def test_a_strategy_is_asked_about_the_plan_as_it_would_be_for_them(self) -> None:
        """Else that one would win by having half of the work."""
        asked: list[ParallelPlan] = []

        def ask(strategy: str, survivors: Survivors, running: ParallelPlan, timeout_s: float) -> Heard:
            asked.append(running)
            return Heard(TOO_LITTLE, made_ahead=False, waited_s=0.2)

        uneven = replace(START, replicas=tuple(
            replace(each, micro_batches=mine) for each, mine in zip(START.replicas, ((0, 1, 3), (2,)), strict=True)
        ))  # fmt: skip
        plan, told = StrategicPlan(ask)(self.survivors(uneven))
        assert [len(each.micro_batches) for each in asked[0].replicas] == [6, 2]
        assert plan.micro_batch_count == 8 and [len(each.micro_batches) for each in plan.replicas] == [6, 2]
        assert told == [], "nothing has to move"

    def test_ops_that_are_listed_one_by_one_are_for_other_micro_batches(self) -> None:
        orders = tuple(tuple(PlannedOp(kind, 0, number) for number in range(4) for kind in "FB") for _ in range(1))
        listed = ParallelPlan((Replica(((0,),), (0, 1, 2, 3), (Chunk(0, 0, 6),), Schedule(EXPLICIT, orders=orders)),))
        [replica] = dealt_anew(listed, 8).replicas
        assert replica.schedule is None and replica.micro_batches == tuple(range(8))
        assert dealt_anew(listed, 4) == listed


def test_who_gets_no_work_keeps_its_state_where_there_is_room() -> None:
    one = ParallelPlan((Replica(((1,), (2,)), (0, 1, 2, 3), (Chunk(0, 0, 2), Chunk(1, 2, 6))),))
    plan, _ = strategic(found(one))(survivors(1, 2, 3))
    assert plan.standbys == {3: (Shard(3, 6, 0, 1),)}
    no_room = replace(one, standbys={3: None})
    plan, _ = strategic(found(no_room))(survivors(1, 2, 3))
    assert plan.standbys == {3: None}


def test_a_plan_of_the_jobs_own_layers_is_said_in_short() -> None:
    own = ParallelPlan((Replica(((1,), (3,)), (0, 1, 2, 3), OWN),))
    plan, _ = strategic(found(own))(survivors(1, 2, 3))
    assert plan.not_uniform is None and plan.standbys == {2: (1, 0)}


@pytest.mark.parametrize(
    ("said", "changed", "reason"),
    [
        (TOO_LITTLE, {}, "too little memory"),
        (found(UNLIKE), {"running": UNLIKE}, "what the last plan gave them"),
        (found(UNLIKE), {"running": None}, "what the last plan gave them"),
        (
            found(UNLIKE),
            {"keeps_degree": "of its optimizer"},
            "each stage needs the job's own number of TP members, 1: of its optimizer",
        ),
    ],
)
def test_uniform_plans_where_there_is_no_such_plan(said: PlannerAnswer, changed: dict[str, Any], reason: str) -> None:
    plan, told = strategic(said)(survivors(1, 2, 3, **changed))
    assert plan.not_uniform is None and plan.members == (1, 2, 3)
    [planned] = told
    assert (planned.strategy, planned.instead_of) == ("uniform", "joint")
    assert reason in planned.reason


class TestWaiting:
    """For a planner that has not answered yet."""

    def late(self, *workers: int, **job: Any) -> tuple[float, list[dict[str, Any]]]:
        """How long it was waited for, and what the log gets."""
        waited: list[float] = []

        def ask(strategy: str, survivors: Survivors, running: ParallelPlan, timeout_s: float) -> Heard:
            waited.append(timeout_s)
            return Heard(
                NoPlan(f"no plan within {timeout_s:g} s", unanswered=True), made_ahead=False, waited_s=timeout_s
            )

        _, told = StrategicPlan(ask)(survivors(*workers, **job))
        [timeout_s] = waited
        return timeout_s, told

    @pytest.mark.parametrize(("job", "timeout_s"), [({}, 2.0), ({"plan_wait": 7.0}, 7.0), ({"plan_wait": 0.0}, 0.0)])
    def test_uniform_plans_overtake_a_plan_that_is_not_there_in_time(
        self, job: dict[str, Any], timeout_s: float
    ) -> None:
        waited_s, [planned] = self.late(1, 2, 3, **job)
        assert waited_s == timeout_s and planned.overtaken and planned.strategy == "uniform"
        assert planned.reason == f"no plan within {timeout_s:g} s"

    def test_where_no_uniform_plan_exists_the_plan_is_worth_waiting_for(self) -> None:
        """The one worker that is left has everything, and the job's own layout has two stages."""
        whole = ParallelPlan((Replica(((0,),), (0, 1), (Chunk(0, 0, 6),)), Replica(((1,),), (2, 3), (Chunk(0, 0, 6),))))
        asked: list[float] = []

        def ask(strategy: str, survivors: Survivors, running: ParallelPlan, timeout_s: float) -> Heard:
            asked.append(timeout_s)
            one = ParallelPlan((Replica(((0,),), (0, 1, 2, 3), (Chunk(0, 0, 6),)),))
            return Heard(found(one), made_ahead=False, waited_s=timeout_s)

        alone = Survivors(SHAPE, OWN, {0: whole.shards_of(0)}, whole, whole, JOB, ARGUMENTS, 4)
        StrategicPlan(ask)(alone)
        assert asked == [30.0]

    def test_no_plan_at_all_is_not_a_late_one(self) -> None:
        _, [planned] = strategic(TOO_LITTLE)(survivors(1, 2, 3))
        assert planned.overtaken is None


def test_uniform_plans_where_its_ops_would_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a plan's own rules were wrong about them."""
    asked = UNLIKE.to_dict()
    orders = ["F0.0 B0.0 F1.0 B1.0 F2.0 F3.0 B2.0 B3.0", "F1.1 B1.1 F0.1 B0.1 F2.1 F3.1 B2.1 B3.1"]
    asked["replicas"][0]["schedule"] = {"name": "explicit", "orders": orders}
    monkeypatch.setattr(rules, "stuck_op", lambda *_: None)
    plan, [planned] = strategic(found(ParallelPlan.from_dict(asked)))(survivors(1, 2, 3))
    assert plan.not_uniform is None
    assert "op B0.0 waits for an op that waits for it" in planned.reason


def test_no_strategy_is_asked_unless_wanted() -> None:
    def never(*_: Any) -> Heard:
        raise AssertionError

    plan, told = StrategicPlan(never)(survivors(1, 2, 3, strategy="uniform"))
    assert plan.not_uniform is None and not told


class TestAnswer:
    """What the planner's process answers, without the process."""

    def ask(self, strategy: str, speeds: dict[int, float], job: KnownJob = KNOWN) -> PlannerAnswer:
        return answer(PlannerRequest(strategy, job, OWN, 4, 4, START, speeds))

    def found(self, strategy: str, speeds: dict[int, float]) -> PlanFound:
        said = self.ask(strategy, speeds)
        assert isinstance(said, PlanFound)
        return said

    @pytest.mark.parametrize("strategy", ["drop-replica", "resihp-paper", "malleus", "joint"])
    def test_a_death(self, strategy: str) -> None:
        said = self.found(strategy, {1: 1.0, 2: 1.0, 3: 1.0})
        assert set(said.plan.working) <= {1, 2, 3} and said.plan.micro_batch_count == 4
        assert said.current_s is None and said.healthy_s > 0
        assert 0 < said.bound_s <= said.iteration_s * (1 + 1e-9)

    def test_a_slow_worker(self) -> None:
        said = self.found("joint", {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.3})
        assert said.current_s is not None
        assert said.iteration_s < 0.8 * said.current_s, "less for who is slow"
        assert said.current_s > 2 * said.healthy_s
        assert not said.plan.uneven_shards

    def test_no_plan(self) -> None:
        assert "no strategy restart" in str(self.ask("restart", {1: 1.0}))
        untold = replace(KNOWN, arguments=None)
        assert self.ask("joint", {1: 1.0}, untold) == NoPlan("the workers have not told the model's sizes")


def test_a_plan_whose_first_step_has_failed_is_not_taken_again() -> None:
    """Whatever others keep under it."""
    failed = {replace(UNLIKE, standbys={5: None}).work_digest: "RuntimeError: no such kernel"}
    plan, told = strategic(found(UNLIKE))(replace(survivors(1, 2, 3), failed=failed))
    assert plan.not_uniform is None
    assert told[0].reason == "its plan has failed in the first step: RuntimeError: no such kernel"


class TestSharedSequences:
    """Two replicas share each sequence; of four workers three are left."""

    SHAPE: ClassVar = JobShape(1, 1, micro_batches=6, workers_per_node=4, sharings=sharings((2, 1), (1,)))
    OWN: ClassVar = even_chunks(4, 1)

    def survivors(self, *workers: int, **job: Any) -> Survivors:
        told = replace(
            JOB, strategy="uniform", emulated=None, chunks=self.OWN, pipeline_parallel=1, micro_batches=6,
            context_parallel=2, **job,
        )  # fmt: skip
        start = initial_plan(self.SHAPE, 4)
        full = spelled_out(start, self.OWN)
        held = {worker: full.shards_of(worker) for worker in workers}
        return Survivors(self.SHAPE, self.OWN, held, start, start, told, ARGUMENTS, 4)

    def test_each_has_sequences_of_its_own_where_that_is_faster_and_fits(self) -> None:
        plan, _ = uniform_plan(self.survivors(0, 1, 2, device_memory=2**30))
        assert (plan.context_parallel, len(plan.replicas)) == (1, 3)

    def test_unlike_numbers_share_them_where_that_is_faster_still(self) -> None:
        """Two share three of four, and one has the fourth alone; a batch of twice the size is dealt likewise."""
        survivors = self.survivors(0, 1, 2, device_memory=2**30)
        four = replace(survivors, shape=replace(self.SHAPE, micro_batches=4, unlike_context=True))
        plan, _ = uniform_plan(four)
        assert (plan.context_groups, plan.micro_batch_count) == ((2, 1), 4)
        larger = dealt_anew(plan, 8)
        assert [len(each.micro_batches) for each in larger.replicas] == [6, 6, 2]
        assert larger.micro_batch_count == 8 and larger.context_groups == (2, 1)

    @pytest.mark.parametrize(
        ("job", "reason"),
        [
            ({}, None),
            ({"experts": 4}, "groups of one size in a job with --num-experts"),
            ({"keeps_context": "sinkhorn"}, "2 replicas must share each sequence, not 2 or 1: sinkhorn"),
            ({"seq_length": 30}, "2 replicas can't share the 30 tokens"),
        ],
    )
    def test_where_unlike_numbers_can_share_them(self, job: dict[str, Any], reason: str | None) -> None:
        replicas = tuple(Replica(((w,),), hand) for w, hand in enumerate([(0, 1), (0, 1), (2,)]))
        plan = ParallelPlan(replicas, context_parallel=2, context_groups=(2, 1))
        with nullcontext() if reason is None else pytest.raises(PlanError, match=reason):
            mode_of(plan).check_ops(plan, self.OWN, self.survivors(0, **job).job)

    def test_they_go_on_sharing_where_whole_sequences_exceed_memory(self) -> None:
        survivors = self.survivors(0, 1, 2, memory_reserve=0.0)
        shared, alone = (
            max(use.total for use in memory_of(spelled_out(plan, self.OWN), *model_and_training()).values())
            for plan in (survivors.previous, uniform_plan(survivors)[0])
        )
        assert shared < alone
        plan, _ = uniform_plan(replace(survivors, job=replace(survivors.job, device_memory=(shared + alone) // 2)))
        assert (plan.context_parallel, len(plan.replicas), set(plan.standbys)) == (2, 2, {2})

    def test_they_go_on_sharing_where_nobody_knows_what_fits(self) -> None:
        """Some kinds of recomputation are not modelled. One that is left has no choice."""
        unknown = {**ARGUMENTS, "recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"]}
        shared, alone = (
            uniform_plan(replace(self.survivors(*workers, device_memory=2**30), arguments=unknown))[0]
            for workers in ((0, 1, 2), (0,))
        )
        assert (shared.context_parallel, len(shared.replicas)) == (2, 2)
        assert (alone.context_parallel, len(alone.replicas)) == (1, 1)

    def test_one_that_is_left_goes_on_without_a_reserve(self) -> None:
        """Whole sequences need all of its memory."""
        alone, _ = uniform_plan(self.survivors(0))
        needed = max(use.total for use in memory_of(spelled_out(alone, self.OWN), *model_and_training()).values())
        plan, _ = uniform_plan(self.survivors(0, device_memory=needed, memory_reserve=50.0))
        assert (plan.context_parallel, len(plan.replicas)) == (1, 1)

    def test_one_that_is_left_says_what_exceeds_its_memory(self) -> None:
        with pytest.raises(NoPlanError, match=r"can't share sequences in groups of 2; with 1 of them memory exceeded"):
            uniform_plan(self.survivors(0, device_memory=2**16))

    @pytest.mark.parametrize(
        ("plan", "reason"),
        [
            (UNLIKE, "a job with context parallelism runs uniform plans only: stages differ in tensor-parallel degree"),
            (
                ParallelPlan(tuple(Replica(((w,),), (0,)) for w in range(3)), context_parallel=3),
                "by 2 replicas at most",
            ),
        ],
    )
    def test_plans_that_cannot_be_run_are_refused(self, plan: ParallelPlan, reason: str) -> None:
        with pytest.raises(PlanError, match=reason):
            mode_of(plan).check_ops(plan, self.OWN, self.survivors(0).job)


class TestSharersThatPlanBySpeed:
    """Two pairs of replicas share experts; the planner is asked as its process asks it."""

    OWN: ClassVar = even_chunks(4, 1)
    ARGUMENTS: ClassVar = {**ARGUMENTS, "num_experts": 4, "moe_ffn_hidden_size": 64}
    TOLD: ClassVar = replace(
        JOB, chunks=OWN, pipeline_parallel=1, micro_batches=8, expert_parallel=2, experts=4, emulated=None
    )

    def survivors(self, *workers: int, arguments: dict[str, Any] | None = None, **told: Any) -> Survivors:
        job = replace(self.TOLD, **told)
        shape = shape_of(job, workers_per_node=4)
        start = initial_plan(shape, 4)
        full = spelled_out(start, self.OWN)
        held = {worker: full.shards_of(worker) for worker in workers}
        return Survivors(shape, self.OWN, held, start, start, job, arguments or self.ARGUMENTS, 4)

    def ask(self, survivors: Survivors, **slow: float) -> PlannerAnswer:
        speeds = {worker: slow.get(f"w{worker}", 1.0) for worker in survivors.held}
        return answer(PlannerRequest("joint", survivors.known, self.OWN, 4, 4, survivors.previous, speeds))

    def next_plan(self, survivors: Survivors, **slow: float) -> tuple[ParallelPlan, Planned]:
        strategic = StrategicPlan(lambda *_: Heard(self.ask(survivors, **slow), made_ahead=False, waited_s=0.2))
        plan, [planned] = strategic(survivors)
        assert isinstance(planned, Planned)
        return plan, planned

    def by_choice(self, survivors: Survivors, **slow: float) -> ParallelPlan:
        """What is run of what the planner says while all live."""
        said = self.ask(survivors, **slow)
        assert isinstance(said, PlanFound)
        living = survivors.held.keys()
        return plan_to_change_to(said.plan, survivors.previous, self.OWN, survivors.shape.tensor_parallel, living)

    def test_the_pair_of_a_slow_worker_gets_less(self) -> None:
        survivors = self.survivors(0, 1, 2, 3)
        plan = self.by_choice(survivors, w2=0.5)
        mode_of(plan).check_ops(plan, self.OWN, survivors.job)
        assert (plan.not_uniform, plan.expert_parallel) == (None, 2)
        assert [len(replica.micro_batches) for replica in plan.replicas] == [3, 3, 1, 1]

    def test_the_same_micro_batches_meet_where_they_must(self) -> None:
        survivors = self.survivors(0, 1, 2, 3, keeps_experts="of what they get", equal_rounds="of what they get")
        plan = self.by_choice(survivors, w2=0.5)
        mode_of(plan).check_ops(plan, self.OWN, survivors.job)
        assert [replica.micro_batches for replica in plan.replicas] == [(0, 4, 6), (1, 5, 7), (2,), (3,)]

    def test_with_all_well_nothing_changes(self) -> None:
        with pytest.raises(ChangeRefused, match="in force already"):
            self.by_choice(self.survivors(0, 1, 2, 3))

    def test_those_that_share_sequences(self) -> None:
        survivors = self.survivors(
            0, 1, 2, 3, arguments=ARGUMENTS, expert_parallel=1, experts=0, context_parallel=2, micro_batches=4
        )
        plan = self.by_choice(survivors, w2=0.4)
        mode_of(plan).check_ops(plan, self.OWN, survivors.job)
        assert plan.context_parallel == 2
        assert [replica.micro_batches for replica in plan.replicas] == [(0, 2, 3), (0, 2, 3), (1,), (1,)]

    def test_a_death(self) -> None:
        plan, planned = self.next_plan(self.survivors(0, 1, 2))
        assert (planned.strategy, planned.instead_of) == ("joint", None)
        assert (plan.not_uniform, set(plan.working)) == (None, {0, 1, 2})

    def test_a_death_where_another_is_slow(self) -> None:
        """Who is slow has fewer micro-batches than in a uniform plan of the three that are left, or none."""
        plan, _ = self.next_plan(self.survivors(0, 1, 2), w2=0.3)
        counts = {replica.stages[0][0]: len(replica.micro_batches) for replica in plan.replicas}
        assert counts.get(2, 0) <= 1 and sum(counts.values()) == 8

    @pytest.mark.parametrize(("shared_out", "strategy"), [(True, "joint"), (False, None)])
    def test_experts_that_died_with_their_only_holder(self, shared_out: bool, strategy: str | None) -> None:
        """Parts of a distributed optimizer have copies, of which experts are made."""
        survivors = self.survivors(0, 1, 2, expert_parallel=4, distributed_optimizer=shared_out)
        if strategy is None:
            with pytest.raises(NoPlanError, match="held by no survivor"):
                self.next_plan(survivors)
            return
        plan, planned = self.next_plan(survivors)
        assert planned.strategy == strategy and set(plan.working) == {0, 1, 2}

    def test_a_strategy_that_knows_of_no_sharers(self) -> None:
        survivors = self.survivors(0, 1, 2)
        said = answer(PlannerRequest("malleus", survivors.known, self.OWN, 4, 4, survivors.previous, {0: 1.0, 1: 1.0}))
        assert said == NoPlan("malleus doesn't know of sequences or experts that replicas share")


class TestTokensThatMeet:
    """Pairs of replicas share experts, and the same micro-batches must meet in them."""

    OWN: ClassVar = even_chunks(4, 1)
    MET: ClassVar = replace(
        JOB, chunks=OWN, pipeline_parallel=1, micro_batches=8, expert_parallel=2, experts=4,
        keeps_experts="of what they get", equal_rounds="of what they get",
    )  # fmt: skip

    def survivors(self, *workers: int, **told: Any) -> Survivors:
        job = replace(self.MET, **told)
        shape = shape_of(job, workers_per_node=4)
        start = initial_plan(shape, 4)
        full = spelled_out(start, self.OWN)
        return Survivors(shape, self.OWN, {w: full.shards_of(w) for w in workers}, start, start, job, ARGUMENTS, 4)

    def check(self, *hands: tuple[int, ...], sharing: int = 2) -> None:
        replicas = tuple(Replica(((worker,),), hand) for worker, hand in enumerate(hands))
        plan = ParallelPlan(replicas, expert_parallel=sharing)
        mode_of(plan).check_ops(plan, self.OWN, self.MET)

    def test_whole_pairs_go_on(self) -> None:
        plan, _ = uniform_plan(self.survivors(0, 1, 2))
        assert (plan.expert_parallel, len(plan.replicas), plan.standbys) == (2, 2, {2: None})
        mode_of(plan).check_ops(plan, self.OWN, self.MET)
        alone, _ = uniform_plan(self.survivors(0, 1, 2, keeps_experts="", equal_rounds=""))
        assert (alone.expert_parallel, len(alone.replicas)) == (1, 3)

    @pytest.mark.parametrize("replicas", [2, 4, 6, 8, 10, 12])
    def test_the_same_meet_in_uniform_plans_of_any_size(self, replicas: int) -> None:
        shape = shape_of(replace(self.MET, micro_batches=24), workers_per_node=4)
        plan = initial_plan(shape, 12)
        held = dict.fromkeys(range(replicas), Coordinate(0, 0))
        fewer = plan_uniform(shape, held, plan)
        assert len(fewer.replicas) == replicas
        mode_of(fewer).check_ops(fewer, self.OWN, self.MET)

    def test_half_a_pair_does_not(self) -> None:
        held = self.survivors(0, 1)
        half = replace(held, held={0: (Shard(0, 6, 0, 1),)})
        with pytest.raises(NoPlanError, match="can't share experts in groups of 2"):
            uniform_plan(half)

    def test_other_numbers_that_share(self) -> None:
        with pytest.raises(PlanError, match="2 replicas must share experts, not 1: of what they get"):
            self.check((0, 2, 4, 6), (1, 3, 5, 7), sharing=1)

    @pytest.mark.parametrize(
        "hands", [((0, 1, 2, 3), (4, 5, 6, 7)), ((1, 3, 5, 7), (2, 4, 6, 0)), ((0, 2, 4, 6), (1, 3, 7, 5))]
    )
    def test_other_micro_batches_that_meet(self, hands: tuple[tuple[int, ...], ...]) -> None:
        self.check((0, 2, 4, 6), (1, 3, 5, 7))
        self.check((4, 0), (5, 1), (2, 6), (3, 7))
        with pytest.raises(PlanError, match="other micro-batches would meet in the experts: of what they get"):
            self.check(*hands)

    def test_micro_batches_that_meet_none(self) -> None:
        with pytest.raises(PlanError, match="must have equal numbers of micro-batches: of what they get"):
            self.check((0, 2, 4, 6, 7), (1, 3, 5))

    @pytest.mark.parametrize(("why", "hands"), [("", [3, 3, 2]), ("they run in turns", [])])
    def test_where_they_may_have_unequal_numbers_of_micro_batches(self, why: str, hands: list[int]) -> None:
        """Three of four that shared six experts are left. If their numbers must be equal, each has all experts."""
        free = {"keeps_experts": "", "equal_rounds": why, "expert_parallel": 4, "experts": 12}
        survivors = replace(self.survivors(0, 1, 2, **free), held=dict.fromkeys(range(3), (Shard(0, 6, 0, 1),)))
        plan, _ = uniform_plan(survivors)
        assert (plan.expert_parallel, len(plan.replicas)) == (3 if hands else 1, 3)
        shared = replace(plan, expert_parallel=3)
        if hands:
            assert [len(replica.micro_batches) for replica in plan.replicas] == hands
            mode_of(shared).check_ops(shared, self.OWN, survivors.job)
        else:
            with pytest.raises(PlanError, match="equal numbers of micro-batches: they run in turns"):
                mode_of(shared).check_ops(shared, self.OWN, survivors.job)


def test_survivors_with_more_experts_each_go_on_without_room_for_what_was_before() -> None:
    """Their host memory has no room for the old state either; without a plan the job ends."""
    own = even_chunks(4, 1)
    arguments = ARGUMENTS | {"num_experts": 8, "moe_ffn_hidden_size": 1024, "moe_router_topk": 2, "bf16": True,
                             "expert_model_parallel_size": 4, "use_distributed_optimizer": True}  # fmt: skip
    model, training = model_from_arguments(arguments), training_of_job(arguments, OwnSplit(own, 1))
    job = replace(JOB, chunks=own, pipeline_parallel=1, micro_batches=8, expert_parallel=4, experts=8,
                  even_experts="no test has it", distributed_optimizer=True, host_memory=0)  # fmt: skip
    shape = shape_of(job, workers_per_node=4)
    start = initial_plan(shape, 4)
    full = spelled_out(start, own)
    held = {worker: full.shards_of(worker) for worker in range(3)}
    survivors = Survivors(shape, own, held, start, start, job, arguments, 4)
    pairs = tuple(each for each in shape.sharings if each.experts in (4, 2))
    shared, _ = uniform_plan(replace(survivors, shape=replace(shape, sharings=pairs)))
    needed = max(use.total for use in memory_of(spelled_out(shared, own), model, training).values())
    plan, _ = uniform_plan(replace(survivors, job=replace(job, device_memory=needed)))
    assert (plan.expert_parallel, len(plan.replicas)) == (2, 2)
    with pytest.raises(NoPlanError, match="memory exceeded"):
        uniform_plan(replace(survivors, job=replace(job, device_memory=needed // 2)))


class TestUnequalNumbersOfExperts:
    """Four workers share eight experts, and one is lost."""

    OWN: ClassVar = even_chunks(4, 1)
    SHARED: ClassVar = replace(
        JOB, chunks=OWN, pipeline_parallel=1, micro_batches=8, expert_parallel=4, experts=8, distributed_optimizer=True
    )

    def plan(self, sharers: int, experts: int) -> ParallelPlan:
        hands = [tuple(range(worker, 8, sharers)) for worker in range(sharers)]
        replicas = tuple(Replica(((worker,),), hand) for worker, hand in enumerate(hands))
        return ParallelPlan(replicas, expert_parallel=sharers, uneven_experts=experts)

    @pytest.mark.parametrize(
        ("told", "degrees"),
        [
            ({}, [4, 2, 1, 3]), ({"even_experts": "no test has it"}, [4, 2, 1]), ({"context_parallel": 2}, [4, 2, 1]),
            ({"tensor_parallel": 2, "expert_members": 1}, [4, 2, 1]), ({"keeps_experts": "of what they get"}, [4]),
            ({"pipeline_parallel": 2, "pipeline_last": False}, [4]),
            ({"experts": 12, "even_experts": "some fail", "powers_of_two": "some fail"}, [4, 2, 1]),
        ],
    )  # fmt: skip
    def test_where_they_may_be_dealt_so(self, told: dict[str, Any], degrees: list[int]) -> None:
        shape = shape_of(replace(self.SHARED, **told), workers_per_node=4)
        assert list(dict.fromkeys(each.experts for each in shape.sharings)) == degrees
        assert [each.uneven for each in shape.sharings if each.experts == 3] == [8] * degrees.count(3)
        facts = JobFacts()
        facts.note(job_described(0, replace(self.SHARED, **told)))
        assert facts.sharings == shape.sharings, "planners that follow the event log know the same"

    def test_three_share_where_memory_holds_them_and_not_all_of_each(self) -> None:
        """Copies of parts of the optimizer have what was lost. Where each survivor may have all experts, it has. The
        job's own strategy does as well."""
        arguments = {**ARGUMENTS, "num_experts": 8, "moe_ffn_hidden_size": 256, "use_distributed_optimizer": True}
        shape = shape_of(self.SHARED, workers_per_node=4)
        start = initial_plan(shape, 4)
        full = spelled_out(start, self.OWN)
        held = {worker: full.shards_of(worker) for worker in range(3)}

        def survivors(device_memory: int) -> Survivors:
            job = replace(self.SHARED, device_memory=device_memory, memory_reserve=0.0, host_memory=2**30)
            return Survivors(shape, self.OWN, held, start, start, job, arguments, 4)

        alone, _ = uniform_plan(survivors(2**30))
        assert (alone.expert_parallel, len(alone.replicas), alone.uneven_experts) == (1, 3, 0)
        model, training = model_from_arguments(arguments), training_from_arguments(arguments)
        used = memory_of(spelled_out(alone, self.OWN), model, training)
        left = survivors(max(use.total for use in used.values()) - 1)
        shared, _ = uniform_plan(left)
        assert (shared.expert_parallel, shared.uneven_experts) == (3, 8) and not shared.standbys
        assert [len(replica.micro_batches) for replica in shared.replicas] == [3, 3, 2]
        found = answer(PlannerRequest("joint", left.known, self.OWN, 4, 4, start, dict.fromkeys(held, 1.0)))
        assert isinstance(found, PlanFound), found
        assert (found.plan.expert_parallel, found.plan.uneven_experts) == (3, 8) and not found.plan.standbys

    @pytest.mark.parametrize(
        ("sharers", "experts", "why", "reason"),
        [
            (3, 0, "", r"3 replicas can't share the 8 experts of a layer evenly; unless .* \"uneven_experts\": 8"),
            (3, 0, "no test has it", "3 replicas can't share the 8 experts of a layer evenly$"),
            (3, 10, "", "each layer has 8 experts, not 10"),
            (3, 8, "no test has it", "experts can't be dealt in unequal numbers: no test has it"),
        ],
    )
    def test_what_users_ask_for(self, sharers: int, experts: int, why: str, reason: str) -> None:
        good = self.plan(3, 8)
        mode_of(good).check_ops(good, self.OWN, self.SHARED)
        plan = self.plan(sharers, experts)
        with pytest.raises(PlanError, match=reason):
            mode_of(plan).check_ops(plan, self.OWN, replace(self.SHARED, even_experts=why))


def model_and_training() -> tuple[Model, Training]:
    return model_from_arguments(ARGUMENTS), training_from_arguments(ARGUMENTS)


class TestGradientsThatCollectivesAverage:
    """With --ddp-average-in-collective, Megatron refuses to start under some plans."""

    OWN: ClassVar = even_chunks(4, 1)
    SHARED: ClassVar = replace(
        JOB, chunks=OWN, pipeline_parallel=1, micro_batches=160, expert_parallel=8, experts=40,
        even_experts="some fail", powers_of_two="some fail",
    )  # fmt: skip

    def test_megatron_takes_every_plan(self) -> None:
        """Its DistributedDataParallel has this assertion of two groups' sizes. Of 80 replicas, 55 that are left would
        else share 40 experts by five."""
        shape = shape_of(self.SHARED, workers_per_node=4)
        for living in range(1, 81):
            sharing, replicas = shape.sharing(living)
            with_same_experts = replicas // sharing.experts
            assert with_same_experts / replicas / with_same_experts == 1.0 / replicas, (sharing, replicas)

    @pytest.mark.parametrize(("sharers", "taken"), [(8, True), (5, False), (4, True), (3, False), (1, True)])
    def test_what_users_ask_for(self, sharers: int, taken: bool) -> None:
        hands = (tuple(range(worker, 160, 120)) for worker in range(120))
        replicas = tuple(Replica(((worker,),), hand) for worker, hand in enumerate(hands))
        plan = ParallelPlan(replicas, expert_parallel=sharers)
        refused = pytest.raises(PlanError, match=f"a power of two of replicas must share experts, not {sharers}: some")
        with nullcontext() if taken else refused:
            mode_of(plan).check_ops(plan, self.OWN, self.SHARED)
