# SPDX-License-Identifier: Apache-2.0
"""Heterogeneous plans: replicas that differ, orders of ops, migrations; what is refused, and how plans differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.coding import decode
from megatron_resihp.pipeline.op import Op
from megatron_resihp.pipeline.schedules import interleaved, one_f_one_b, zero_bubble_h1
from megatron_resihp.plan import (
    Chunk,
    Coordinate,
    Migration,
    ParallelPlan,
    PlanError,
    PlannedOp,
    Replica,
    Schedule,
    Shard,
    differences,
)

FIVE_FIVE = (Chunk(0, 0, 5), Chunk(1, 5, 10))


def explicit(*orders: str) -> Schedule:
    return decode(Schedule, {"name": "explicit", "orders": list(orders)})


def listed(ops: Sequence[Sequence[Op]], micro_batches: Sequence[int] | None = None) -> Schedule:
    """A pipeline program as an explicit schedule of these micro-batches."""
    return explicit(
        *(" ".join(f"{op.kind.name}{micro_batches[op.micro_batch] if micro_batches else op.micro_batch}.{op.stage}"
                   for op in order) for order in ops)
    )  # fmt: skip


UNLIKE = ParallelPlan(
    (
        Replica(((0, 1, 2), (3,)), (0, 2, 4), (Chunk(0, 0, 7), Chunk(1, 7, 10)), Schedule("1f1b")),
        Replica(
            ((4, 5), (6, 7), (8,)), (1, 3),
            (Chunk(0, 0, 4), Chunk(1, 4, 8), Chunk(2, 8, 10)), Schedule("zero-bubble-h1"),
        ),
    ),
    {9: (Shard(0, 4, 1, 2), Shard(8, 10, 0, 1)), 10: Coordinate(0, 2), 11: None},
    uneven_shards=True,
)  # fmt: skip

MIGRATED = ParallelPlan(
    (
        # Stage 1 of replica 0 is dead; replica 1 does its work.
        Replica(((0,), ()), (0, 2), schedule=explicit("F0.0 F2.0 B0.0 B2.0", "")),
        Replica(((1,), (2,)), (1, 3), schedule=explicit(
            "F1.0 F3.0 B1.0 B3.0", "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1"
        )),
    ),
    migrations=(Migration(0, 1, 1), Migration(2, 1, 1)),
)  # fmt: skip


class TestUnlikeReplicas:
    def test_what_a_worker_holds(self) -> None:
        assert UNLIKE.shards_of(1) == (Shard(0, 7, 1, 3),)
        assert UNLIKE.shards_of(8) == (Shard(8, 10, 0, 1),)
        assert UNLIKE.shards_of(9) == (Shard(0, 4, 1, 2), Shard(8, 10, 0, 1))
        assert UNLIKE.shards_of(10) == (Shard(0, 7, 2, 3),)
        assert UNLIKE.shards_of(11) == UNLIKE.shards_of(99) == ()

    def test_a_worker_with_several_chunks_holds_all_of_them(self) -> None:
        chunks = (Chunk(0, 0, 3), Chunk(1, 3, 5), Chunk(0, 5, 5), Chunk(1, 5, 6))
        plan = ParallelPlan((Replica(((0,), (1,)), (0, 1), chunks, Schedule("interleaved")),))
        assert plan.shards_of(0) == (Shard(0, 3, 0, 1),)
        assert plan.shards_of(1) == (Shard(3, 5, 0, 1), Shard(5, 6, 0, 1))

    def test_have_no_common_shape(self) -> None:
        with pytest.raises(PlanError, match=r"different shapes: \[\(2, 2, 1\), \(3, 1\)\]"):
            _ = UNLIKE.grid.pipeline_parallel

    def test_a_plan_without_layers_does_not_know_them(self) -> None:
        with pytest.raises(PlanError, match="doesn't say which layers"):
            ParallelPlan((Replica(((0,),), (0,)),)).shards_of(0)


class TestUniform:
    plain = ParallelPlan((Replica(((0, 1),), (0,)), Replica(((2, 3),), (1,))), {4: Coordinate(0, 1), 5: None})

    def test_a_plain_plan_can_be_run_by_megatrons_groups(self) -> None:
        assert self.plain.not_uniform is None

    @pytest.mark.parametrize(
        ("plan", "reason"),
        [
            (ParallelPlan((Replica(((0, 1), (2,)), (0,)),)), "differ in tensor-parallel degree"),
            (ParallelPlan((Replica(((0,),), (0,)), Replica(((1, 2),), (1,)))), "differ in tensor-parallel degree"),
            (ParallelPlan((Replica(((0,),), (0,), (Chunk(0, 0, 3),)),)), "layers are split otherwise"),
            (ParallelPlan((Replica(((0,),), (0,), schedule=Schedule("1f1b")),)), "ops are ordered otherwise"),
            (replace(plain, uneven_shards=True), "shards are uneven"),
            (
                ParallelPlan((
                    Replica(((0,), (1,)), (0,), FIVE_FIVE), Replica(((2,),), (1,), (Chunk(0, 0, 10),)),
                )),
                "differ in their number of stages",
            ),
            (UNLIKE, "differ"),
            (MIGRATED, "differ"),
        ],
    )  # fmt: skip
    def test_of_any_other_the_reason_is_told(self, plan: ParallelPlan, reason: str) -> None:
        assert plan.not_uniform is not None and reason in plan.not_uniform


def two(chunks: Sequence[tuple[int, int, int]], **more: Any) -> ParallelPlan:
    return ParallelPlan((Replica(((0,), (1,)), (0, 1), tuple(Chunk(*chunk) for chunk in chunks), **more),))


def ordered(*orders: str) -> ParallelPlan:
    return ParallelPlan((Replica(((0,), (1,)), (0, 1), schedule=explicit(*orders)),))


class TestRules:
    @pytest.mark.parametrize(
        ("make", "rule"),
        [
            (lambda: two([(0, 0, 5), (1, 6, 10)]), "replica 0: layer 5 is missing"),
            (lambda: two([(0, 1, 5), (1, 5, 10)]), "replica 0: layer 0 is missing"),
            (lambda: two([(0, 0, 5), (1, 4, 10)]), "replica 0: layer 4 stands twice"),
            (lambda: two([(0, 0, 5), (1, 5, 4)]), "chunk 1 ends before its first layer, 5"),
            (lambda: two([(0, 0, 5), (2, 5, 10)]), "chunk 1 is on stage 2; stages are 0 to 1"),
            (lambda: two([(0, 0, 5), (0, 5, 10)]), "stage 1 has no chunk"),
            (
                lambda: ParallelPlan((
                    Replica(((0,), (1,)), (0,), FIVE_FIVE), Replica(((2,),), (1,), (Chunk(0, 0, 8),)),
                )),
                "replica 1: layer 8 is missing",
            ),
            (
                lambda: ParallelPlan((Replica(((0,), (1,)), (0,), FIVE_FIVE), Replica(((2,), (3,)), (1,)))),
                "replica 1 doesn't say which layers",
            ),
            (lambda: two([(1, 0, 5), (0, 5, 10)], schedule=Schedule("1f1b")), "1f1b needs one chunk for each stage"),
            (
                lambda: two([(0, 0, 2), (1, 2, 4), (1, 4, 6), (0, 6, 8)], schedule=Schedule("interleaved")),
                "dealt to the stages in turns",
            ),
            (lambda: two([(1, 0, 5), (0, 5, 10)]), "replica 0 doesn't list its ops, and its chunks aren't dealt"),
            (lambda: two([(0, 0, 5), (1, 5, 10)], schedule=Schedule("interleaved", 1)), "group of 1 .* smaller"),
            (lambda: Schedule("gpipe"), "unknown schedule 'gpipe'; known are 1f1b, interleaved"),
            (lambda: Schedule("1f1b", 2), "only interleaved has groups"),
            (lambda: Schedule("explicit"), "lists its ops"),
            (lambda: ordered("F0.0"), "ops are listed for 1 of 2 stages"),
            (lambda: ordered("F0.0 F1.0 B0.0", "F0.1 B0.1 F1.1 B1.1"), r"stage 0: op B1\.0 is missing"),
            (lambda: ordered("F0.0 F0.0", ""), r"op F0\.0 stands twice"),
            (lambda: ordered("F0.1", ""), r"op F0\.1 is none of this stage's"),
            (lambda: ordered("F0.0 B1.0", ""), r"op B1\.0 stands before its F"),
            (lambda: ordered("F0.0 F1.0 B0.0 B1.0", "F0.1 B0.1 W0.1 F1.1 B1.1 W1.1"), r"op W0\.0 is missing"),
            (lambda: ordered("F0.0 B0.0 F1.0 B1.0", "F1.1 F0.1 B0.1 B1.1"), "must not wait in a circle"),
            (lambda: explicit("F0"), "'F0' is not an op"),
            (
                lambda: ParallelPlan((Replica(((0,),), (0,)),), {1: (Shard(0, 3, 0, 1),)}),
                "standby 1 keeps layers, but the plan doesn't say",
            ),
            (
                lambda: replace(UNLIKE, standbys={9: (Shard(0, 11, 0, 1),)}),
                "standby 9 keeps .* isn't part of the model",
            ),
            (lambda: replace(MIGRATED, migrations=()), "stage 1 of replica 0 has no worker for micro-batch 0, chunk 1"),
            (lambda: replace(MIGRATED, migrations=(Migration(1, 1, 1),)), "runs the micro-batch itself"),
            (lambda: replace(MIGRATED, migrations=(Migration(7, 1, 1),)), "no such micro-batch"),
            (lambda: replace(MIGRATED, migrations=(Migration(0, 2, 1),)), "no such chunk"),
            (lambda: replace(MIGRATED, migrations=(*MIGRATED.migrations, Migration(0, 1, 1))), "migrated twice"),
            (lambda: replace(UNLIKE, migrations=(Migration(0, 1, 1),)), "has other layers there"),
            (
                lambda: ParallelPlan(
                    (Replica(((0,),), (0,)), Replica(((1,),), (1,))), migrations=(Migration(0, 0, 1),)
                ),
                "replica 0 doesn't list its ops",
            ),
            (lambda: ParallelPlan.from_dict({"version": 3}), "version 3; this program knows versions 1 and 2"),
        ],
    )  # fmt: skip
    def test_broken_ones_are_named(self, make: Callable[[], object], rule: str) -> None:
        with pytest.raises(PlanError, match=rule):
            make()

    def test_migration_that_would_deadlock_is_refused(self) -> None:
        # The helper would finish its own two micro-batches before it takes F0, whose B the owner waits for first.
        first = MIGRATED.replicas[0]
        stuck = replace(first, schedule=explicit("F0.0 B0.0 F2.0 B2.0", ""))
        helper = replace(MIGRATED.replicas[1], schedule=explicit(
            "F1.0 F3.0 B1.0 B3.0", "F2.1 B2.1 F0.1 B0.1 F1.1 B1.1 F3.1 B3.1"
        ))  # fmt: skip
        with pytest.raises(PlanError, match="must not wait in a circle"):
            replace(MIGRATED, replicas=(stuck, helper))

    def test_schedule_that_runs_in_one_replica_is_still_refused_in_others(self) -> None:
        chunks = (Chunk(0, 0, 2), Chunk(1, 2, 4))
        whole = Replica(((0,), (1,)), (0, 1), chunks, explicit("F0.0 F1.0 B0.0 B1.0", "F0.1 B0.1 F1.1 B1.1"))
        assert ParallelPlan((whole,)) == ParallelPlan((whole,))
        assert ParallelPlan((replace(whole, micro_batches=(1, 0)),))
        beside = Replica(((2,), (3,)), (1,), chunks, Schedule("1f1b"))
        for other, rule in (
            (replace(whole, micro_batches=(0, 1, 2)), r"op B2\.0 is missing"),
            (replace(whole, chunks=(Chunk(1, 0, 2), Chunk(0, 2, 4))), r"op F0\.0 is none of this stage's"),
            (replace(whole, chunks=(*chunks, Chunk(0, 4, 4))), r"op B0\.2 is missing"),
        ):
            with pytest.raises(PlanError, match=rule):
                ParallelPlan((other,))
        with pytest.raises(PlanError, match=r"op F1\.0 is none of this stage's"):
            ParallelPlan((replace(whole, micro_batches=(0,)), beside))
        with pytest.raises(PlanError, match=r"op F1\.0 is none of this stage's"):
            ParallelPlan((whole, Replica(((2,), (3,)), (2,), chunks, explicit("F2.0 B2.0", "F2.1 B2.1 F1.1 B1.1"))),
                         migrations=(Migration(1, 0, 1),))  # fmt: skip

    def test_renamed_schedule_is_the_same_order_and_runs_where_the_first_one_does(self) -> None:
        order = explicit("F0.0 F1.0 B0.0 B1.0", "F0.1 B0.1 F1.1 B1.1")
        never = explicit("F0.0 B0.0 F1.0 B1.0", "F1.1 F0.1 B0.1 B1.1")
        whole = Replica(((0,), (1,)), (0, 1), (), order)
        assert ParallelPlan((whole,))
        renamed = order.renamed((0, 1), (2, 0))
        assert renamed == explicit("F2.0 F0.0 B2.0 B0.0", "F2.1 B2.1 F0.1 B0.1")
        assert renamed.known_to_run == {((0, 1), (2, 0))}
        beside = Replica(((2,), (3,)), (1,))
        assert ParallelPlan((replace(whole, micro_batches=(2, 0), schedule=renamed), beside))
        for refused in (never.renamed((0, 1), (2, 0)), order.renamed((0, 1), (2, 3)), order.renamed((0, 1), (0, 0))):
            with pytest.raises(PlanError):
                ParallelPlan((replace(whole, micro_batches=(2, 0), schedule=refused), beside))

    @given(
        stages=st.integers(1, 4), chunks=st.integers(1, 3), micro_batches=st.integers(1, 9), zero_bubble=st.booleans()
    )
    def test_known_programs_are_possible_and_none_of_their_ops_can_be_left_out(
        self, stages: int, chunks: int, micro_batches: int, zero_bubble: bool
    ) -> None:
        if zero_bubble:
            program, chunks = zero_bubble_h1(stages, micro_batches), 1
        elif chunks == 1:
            program = one_f_one_b(stages, micro_batches)
        else:
            program = interleaved(stages, chunks, micro_batches)
        members = tuple((stage,) for stage in range(stages))
        layers = tuple(Chunk(number % stages, number, number + 1) for number in range(stages * chunks))
        whole = Replica(members, tuple(range(micro_batches)), layers, listed(program.ops))
        assert ParallelPlan((whole,)).replicas == (whole,)
        short = listed([program.ops[0][1:], *program.ops[1:]]) if len(program.ops[0]) > 1 else None
        if short:
            with pytest.raises(PlanError, match=r"is missing|stands before"):
                ParallelPlan((replace(whole, schedule=short),))


class TestOnTheWire:
    @pytest.mark.parametrize("plan", [UNLIKE, MIGRATED])
    def test_json_and_back(self, plan: ParallelPlan) -> None:
        data = json.loads(json.dumps(plan.to_dict()))
        assert data["version"] == 2
        again = ParallelPlan.from_dict(data)
        assert again == plan and again.digest == plan.digest

    def test_plans_of_version_1_load_with_the_digest_that_they_had(self) -> None:
        recorded = {
            "replicas": [{"stages": [[0, 1]], "micro_batches": [0, 2]}, {"stages": [[2, 3]], "micro_batches": [1, 3]}],
            "standbys": {"4": [0, 1], "5": None},
        }
        plan = ParallelPlan.from_dict(recorded)
        assert plan.standbys == {4: Coordinate(0, 1), 5: None}
        assert plan.digest == "5fe6e04a9649ccff"

    def test_every_part_counts_in_the_digest(self) -> None:
        plans = [
            MIGRATED,
            replace(MIGRATED, uneven_shards=True),
            UNLIKE,
            replace(UNLIKE, standbys={**UNLIKE.standbys, 9: (Shard(0, 4, 1, 2),)}),
            replace(UNLIKE, replicas=(replace(UNLIKE.replicas[0], schedule=None), UNLIKE.replicas[1])),
            two([(0, 0, 5), (1, 5, 10)]),
            two([(0, 0, 4), (1, 4, 10)]),
        ]
        assert len({plan.digest for plan in plans}) == len(plans)

    def test_an_op_in_words(self) -> None:
        assert PlannedOp.parse("W12.3") == PlannedOp("W", 3, 12) and str(PlannedOp("W", 3, 12)) == "W12.3"


class TestDifferences:
    def test_equal_plans_have_none(self) -> None:
        assert differences(UNLIKE, UNLIKE) == ()

    def test_are_told_replica_by_replica_and_worker_by_worker(self) -> None:
        before = ParallelPlan(
            (Replica(((0, 1), (2, 3)), (0, 2), FIVE_FIVE), Replica(((4, 5), (6, 7)), (1, 3), FIVE_FIVE)), {9: None}
        )
        after = ParallelPlan(
            (
                Replica(((0,), (2, 3)), (0, 1, 2), (Chunk(0, 0, 3), Chunk(1, 3, 10)), Schedule("zero-bubble-h1")),
                Replica(((4, 5), (6, 9)), (3,), FIVE_FIVE),
            ),
            {1: (Shard(0, 3, 0, 2),)},
        )
        assert differences(before, after) == (
            "replica 0: shape PP2 TP2 → PP2 TP1/2",
            "replica 0: layers 5, 5 → 3, 7",
            "replica 0: micro-batches 2 (0 2) → 3 (0 1 2)",
            "replica 0: schedule the job's own → zero-bubble-h1",
            "replica 1: micro-batches 2 (1 3) → 1 (3)",
            "worker 0: replica 0, stage 0, TP rank 0 of 2 → replica 0, stage 0, TP rank 0 of 1",
            "worker 1: replica 0, stage 0, TP rank 1 of 2 → standby with layers 0–2 TP rank 0 of 2",
            "worker 7: replica 1, stage 1, TP rank 1 of 2 → not there",
            "worker 9: standby → replica 1, stage 1, TP rank 1 of 2",
        )

    def test_of_migrations_and_replicas_that_go(self) -> None:
        whole = ParallelPlan((Replica(((0,), (3,)), (0, 2)), Replica(((1,), (2,)), (1, 3))))
        assert differences(whole, MIGRATED)[:5] == (
            "replica 0: shape PP2 TP1 → PP2 TP1/0",
            "replica 0: schedule the job's own → explicit",
            "replica 1: schedule the job's own → explicit",
            "micro-batch 0, chunk 1: now run by replica 1",
            "micro-batch 2, chunk 1: now run by replica 1",
        )
        one = ParallelPlan((Replica(((0,), (3,)), (0, 1, 2, 3)),))
        assert "replica 1: gone" in differences(whole, one) and "replica 1: new, PP2 TP1" in differences(one, whole)
