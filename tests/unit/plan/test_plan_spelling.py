# SPDX-License-Identifier: Apache-2.0
"""Plans said in full and in short: each is the other's inverse, and both say that the same workers hold the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.coding import decode
from megatron_resihp.plan import (
    Chunk,
    Coordinate,
    Migration,
    ParallelPlan,
    PlanError,
    Replica,
    Schedule,
    Shard,
    deal,
    even_chunks,
    even_counts,
    shortened,
    spelled_out,
)
from megatron_resihp.plan.schedule import PlannedOp
from megatron_resihp.plan.spelling import trimmed

SIZES = st.integers(1, 3)


@st.composite
def splits(draw: st.DrawFn, stages: int) -> tuple[Chunk, ...]:
    """A job's own split over stages, each with some layer."""
    ends = [0]
    for _ in range(stages):
        ends.append(ends[-1] + draw(st.integers(1, 5)))
    return tuple(Chunk(stage, *ends[stage : stage + 2]) for stage in range(stages))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[ParallelPlan, tuple[Chunk, ...]]:
    """A uniform plan, with standbys, and the job's own split."""
    tp, pp, dp = draw(SIZES), draw(SIZES), draw(SIZES)
    workers = draw(st.permutations(range(tp * pp * dp + 2)))
    rows = [tuple(workers[tp * number : tp * (number + 1)]) for number in range(pp * dp)]
    shares = deal(even_counts(draw(st.integers(dp, 8)), dp))
    replicas = tuple(Replica(tuple(rows[pp * r : pp * (r + 1)]), share) for r, share in enumerate(shares))
    kept = st.none() | st.builds(Coordinate, st.integers(0, pp - 1), st.integers(0, tp - 1))
    return ParallelPlan(replicas, {worker: draw(kept) for worker in workers[tp * pp * dp :]}), draw(splits(pp))


@given(job=jobs())
def test_a_short_plan_comes_back(job: tuple[ParallelPlan, tuple[Chunk, ...]]) -> None:
    plan, own = job
    full = spelled_out(plan, own)
    assert full.not_uniform is not None
    assert shortened(full, own) == plan
    assert shortened(plan, own) == plan
    assert spelled_out(full, own) == full


@given(job=jobs())
def test_both_say_who_works_where_and_who_holds_what(job: tuple[ParallelPlan, tuple[Chunk, ...]]) -> None:
    plan, own = job
    full = spelled_out(plan, own)
    assert full.members == plan.members
    degree = plan.grid.tensor_parallel
    for worker in plan.members:
        coordinate = plan.coordinate_of(worker)
        layers = own[coordinate.stage] if coordinate else None
        expected = (Shard(layers.first, layers.end, coordinate.tp_rank, degree),) if coordinate and layers else ()
        assert full.shards_of(worker) == expected


INTERLEAVED = (Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(0, 3, 4), Chunk(1, 4, 6))


@pytest.mark.parametrize("schedule", [None, Schedule("interleaved")])
def test_a_job_may_be_interleaved_itself(schedule: Schedule | None) -> None:
    plan = ParallelPlan((Replica(((0,), (1,)), (0, 1)),), {2: Coordinate(1, 0)})
    full = spelled_out(plan, INTERLEAVED)
    assert full.shards_of(1) == full.shards_of(2) == (Shard(2, 3, 0, 1), Shard(4, 6, 0, 1))
    ordered = replace(full, replicas=(replace(full.replicas[0], schedule=schedule),))
    assert shortened(ordered, INTERLEAVED) == plan


@pytest.mark.parametrize(
    "replica",
    [
        Replica(((0,), (1,)), (0,), INTERLEAVED),
        Replica(((0,), (1,)), (0, 1), INTERLEAVED, Schedule("interleaved", group_size=2)),
        Replica(((0,), (1,)), (0, 1), (Chunk(0, 0, 3), Chunk(1, 3, 6))),
    ],
    ids=["fewer micro-batches than stages", "other groups", "a chunk for each stage"],
)
def test_what_an_interleaved_jobs_own_schedule_can_not_run_stays_in_full(replica: Replica) -> None:
    plan = ParallelPlan((replica,))
    assert shortened(plan, INTERLEAVED) is plan


def test_one_f_one_b_by_name_is_the_jobs_own_order() -> None:
    own = even_chunks(4, 2)
    plan = ParallelPlan((Replica(((0,), (1,)), (0, 1), own, Schedule("1f1b")),))
    assert shortened(plan, own) == ParallelPlan((Replica(((0,), (1,)), (0, 1)),))


OWN = even_chunks(4, 2)
BASE = spelled_out(
    ParallelPlan((Replica(((0, 1), (2, 3)), (0, 2)), Replica(((4, 5), (6, 7)), (1, 3))), {8: Coordinate(1, 0)}), OWN
)
FIRST, SECOND = BASE.replicas
LISTED = decode(Schedule, {"name": "explicit", "orders": ["F0.0 F2.0 B0.0 B2.0", "F0.1 B0.1 F2.1 B2.1"]})
HELPING = decode(Schedule, {"name": "explicit", "orders": ["F0.0 B0.0", "F0.1 B0.1 F2.1 B2.1"]})
HELPED = decode(Schedule, {"name": "explicit", "orders": ["F1.0 F3.0 F2.0 B1.0 B3.0 B2.0", "F1.1 B1.1 F3.1 B3.1"]})


@pytest.mark.parametrize(
    "plan",
    [
        replace(BASE, replicas=(replace(FIRST, chunks=(Chunk(0, 0, 4), Chunk(1, 4, 6))), SECOND)),
        replace(BASE, replicas=(replace(FIRST, schedule=Schedule("zero-bubble-h1")), SECOND)),
        replace(BASE, replicas=(replace(FIRST, schedule=LISTED), SECOND)),
        replace(BASE, replicas=(replace(FIRST, stages=((0, 1), (2,))), SECOND)),
        replace(BASE, replicas=(replace(FIRST, stages=((0, 1, 2, 3),), chunks=(Chunk(0, 0, 6),)), SECOND)),
        replace(BASE, standbys={8: (Shard(0, 3, 0, 1),)}),
        replace(BASE, uneven_shards=True),
        replace(
            BASE,
            replicas=(replace(FIRST, schedule=HELPING), replace(SECOND, schedule=HELPED)),
            migrations=(Migration(2, 0, 1),),
        ),
    ],
    ids=["layers", "zero bubble", "order", "degree", "stages", "standby", "uneven shards", "migration"],
)
def test_what_the_job_does_not_say_is_never_left_out(plan: ParallelPlan) -> None:
    assert shortened(plan, OWN) == plan


def test_a_plan_of_other_stages_can_not_be_spelled_out() -> None:
    with pytest.raises(PlanError, match="stage"):
        spelled_out(ParallelPlan((Replica(((0,),), (0,)),)), OWN)


def listed(*orders: str) -> Schedule:
    return Schedule("explicit", orders=tuple(tuple(map(PlannedOp.parse, order.split())) for order in orders))


def test_a_stage_without_layers_is_left_out() -> None:
    """It would pass on what it gets, and hold nothing."""
    chunks = (Chunk(0, 0, 2), Chunk(1, 2, 2), Chunk(2, 2, 4))
    whole = ParallelPlan((Replica(((0,), (2,), (1, 3)), (0,), chunks, listed("F0.0 B0.0", "F0.1 B0.1", "F0.2 B0.2")),))
    [replica] = trimmed(whole).replicas
    assert replica.stages == ((0,), (1, 3)) and replica.chunks == (Chunk(0, 0, 2), Chunk(1, 2, 4))
    assert replica.schedule == listed("F0.0 B0.0", "F0.1 B0.1")
    [usual] = trimmed(replace(whole, replicas=(replace(whole.replicas[0], schedule=None),))).replicas
    assert usual == replace(replica, schedule=None)


def test_a_chunk_without_layers_is_left_out_of_a_stage_that_has_others() -> None:
    chunks = (Chunk(0, 0, 0), Chunk(1, 0, 3), Chunk(0, 3, 4), Chunk(1, 4, 6))
    orders = listed("F0.0 F0.2 B0.2 B0.0", "F0.1 F0.3 B0.3 B0.1")
    [replica] = trimmed(ParallelPlan((Replica(((0,), (1,)), (0,), chunks, orders),))).replicas
    assert replica.chunks == (Chunk(1, 0, 3), Chunk(0, 3, 4), Chunk(1, 4, 6))
    assert replica.schedule == listed("F0.1 B0.1", "F0.0 F0.2 B0.2 B0.0")


def test_embedding_and_head_need_a_place() -> None:
    """Chunks in turns can't be left out, as the others would take other turns then."""
    chunks = (Chunk(0, 0, 0), Chunk(1, 0, 3), Chunk(0, 3, 4), Chunk(1, 4, 6))
    with pytest.raises(PlanError, match="no layers, where embedding and head have to be"):
        trimmed(ParallelPlan((Replica(((0,), (1,)), (0, 1), chunks, Schedule("interleaved")),)))
    inside = (Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(0, 3, 3), Chunk(1, 3, 6))
    plan = ParallelPlan((Replica(((0,), (1,)), (0, 1), inside, Schedule("interleaved")),))
    assert trimmed(plan) == plan


@given(jobs())
def test_nothing_is_left_out_where_all_have_layers(job: tuple[ParallelPlan, tuple[Chunk, ...]]) -> None:
    full = spelled_out(*job)
    assert trimmed(full) == full
