# SPDX-License-Identifier: Apache-2.0
"""What is decided of random plans and deaths, without processes: survivors that hold everything can always go on."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
from chaos_casts import LAYERS, SHARING_CASTS, Cast
from chaos_checks import one_node
from chaos_plans import random_plan, random_sharing_plan

from megatron_resihp.control.replanning.change import ChangeRefused, plan_to_change_to
from megatron_resihp.control.replanning.modes import mode_of, optimizer_after
from megatron_resihp.control.replanning.recovery.inventory import Survivors, copied_experts, lacking, shape_of
from megatron_resihp.control.replanning.recovery.next_plan import uniform_or_less
from megatron_resihp.plan import Chunk, ParallelPlan, PlanError, Shard, spelled_out
from megatron_resihp.plan.copies import lost_parts
from megatron_resihp.plan.slices import (
    all_shards,
    contributors_of,
    cuts_of,
    holders_of,
    plan_moves,
    shares_of,
    slices_of,
)
from megatron_resihp.planner import JobShape, NoPlanError, initial_plan
from megatron_resihp.protocol.job import JobDescription

WORKERS = MICRO_BATCHES = 8
SHAPE = JobShape(tensor_parallel=2, pipeline_parallel=2, micro_batches=MICRO_BATCHES, workers_per_node=WORKERS)
OWN = (Chunk(0, 0, 3), Chunk(1, 3, 6))
EVENTS = 8
JOB = JobDescription(
    micro_batches=MICRO_BATCHES, tensor_parallel=2, pipeline_parallel=2, seq_length=32, sequence_parallel=False,
    chunks=OWN, pipeline_last=True,
)  # fmt: skip
ARGUMENTS = {
    "num_layers": LAYERS - 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32,
    "max_position_embeddings": 32, "padded_vocab_size": 256, "micro_batch_size": 1,
}  # fmt: skip

Held = Mapping[int, tuple[Shard, ...]]


def held_under(plan: ParallelPlan, held: Held) -> Held:
    """What workers hold once they have changed to a plan; they can, and all of it is kept current."""
    full = spelled_out(plan, OWN)
    wanted = all_shards(full)
    cuts = cuts_of(shard for table in (held, wanted) for shards in table.values() for shard in shards)
    for tied_head in (None, LAYERS - 1):
        before = {worker: slices_of(shards, cuts, tied_head) for worker, shards in held.items()}
        after = {worker: slices_of(shards, cuts, tied_head) for worker, shards in wanted.items()}
        assert not plan_moves(before, after)[1], "something is held by nobody"
        assert all(after[worker] <= before[worker] for worker in full.standbys), "standbys fetch nothing"
        assert contributors_of(full, cuts, tied_head).keys() == holders_of(wanted, cuts, tied_head).keys()
    return wanted


@pytest.mark.parametrize("seed", range(40))
def test_survivors_go_on_as_long_as_they_can(seed: int) -> None:
    random = Random(seed)
    plan = initial_plan(SHAPE, WORKERS, True)
    held: Held = all_shards(spelled_out(plan, OWN))
    for _ in range(EVENTS):
        if random.random() < 0.7:
            try:
                plan = plan_to_change_to(random_plan(random, sorted(held), MICRO_BATCHES), plan, OWN, 2, set(held))
            except ChangeRefused:
                continue
        else:
            dead = random.sample(sorted(held), random.choice((0, 1, 1, 2)))
            held = {worker: shards for worker, shards in held.items() if worker not in dead}
            try:
                plan, _ = uniform_or_less(Survivors(SHAPE, OWN, held, plan, plan, JOB, ARGUMENTS, WORKERS))
            except NoPlanError:
                assert lacking(held, LAYERS)
                return
            assert len(held) < SHAPE.replica_size or plan.not_uniform is None
        held = held_under(plan, held)


OWN_CHUNKS = {
    (1, 1): (Chunk(0, 0, 6),),
    (2, 1): OWN,
    (2, 2): (Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(0, 3, 4), Chunk(1, 4, 6)),
}
"""Of jobs with so many stages, and micro-batches that go to a replica at a time."""


def description(cast: Cast, in_parts: bool) -> JobDescription:
    """What workers tell of a job. `in_parts`: it has the distributed optimizer."""
    sharing, interleaved = cast.sharing, cast.dealt > 1
    return JobDescription(
        micro_batches=cast.micro_batches, tensor_parallel=cast.tensor, pipeline_parallel=cast.pipeline,
        chunks=OWN_CHUNKS[cast.pipeline, cast.dealt], seq_length=32, sequence_parallel=cast.tensor > 1,
        pipeline_last=True, micro_batch_group=cast.pipeline if interleaved else None, distributed_optimizer=in_parts,
        context_parallel=sharing.context, expert_parallel=sharing.experts, expert_members=sharing.members,
        experts=cast.model.get("num_experts", 0),
    )  # fmt: skip


def check_that_none_is_lost(plan: ParallelPlan, held: Held, job: JobDescription, in_parts: bool) -> Held:
    """What workers hold under a plan that these have changed to: all of the model, out of what they had."""
    full = spelled_out(plan, job.chunks)
    wanted = all_shards(full)
    assert wanted.keys() == held.keys() and not lacking(wanted, LAYERS)
    mode_of(plan).check_ops(plan, job.chunks, job)
    if not in_parts:  # masters have what no worker holds
        shards = [shard for table in (held, wanted) for each in table.values() for shard in each]
        cuts, shares = cuts_of(shards), shares_of(shards)
        before, after = (
            {worker: slices_of(each, cuts, LAYERS - 1, shares) for worker, each in table.items()}
            for table in (held, wanted)
        )
        assert not plan_moves(before, after)[1], "something is held by nobody"
        assert all(after[worker] <= before[worker] for worker in full.standbys), "standbys fetch nothing"
    return wanted


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("number", range(len(SHARING_CASTS)))
def test_survivors_that_share_go_on_as_long_as_they_can(number: int, in_parts: bool) -> None:
    """Those that share experts or sequences. Uniform plans are never refused."""
    cast = SHARING_CASTS[number]
    for seed in range(10):
        live_through(Random(seed), cast, description(cast, in_parts))


def live_through(random: Random, cast: Cast, job: JobDescription) -> None:
    """Changes and deaths, till there is an end of it or of the job."""
    shape, in_parts = shape_of(job, cast.workers), job.distributed_optimizer
    plan = initial_plan(shape, cast.workers, True)
    held: Held = all_shards(spelled_out(plan, job.chunks))
    for number in range(EVENTS):
        copied: Held = {}
        if random.random() < 0.6:
            asked = random_sharing_plan(random, sorted(held), cast)
            try:
                plan = changed(asked, plan, job, held)
            except (ChangeRefused, PlanError) as error:
                assert "uniform plans only" in str(error) or "in force already" in str(error), asked
                continue
        else:
            dead = random.sample(sorted(held), min(random.choice((0, 1, 1, 2)), len(held)))
            held = {worker: shards for worker, shards in held.items() if worker not in dead}
            if not in_parts:
                copied = copied_experts(plan, job.chunks, held, one_node)
            if random.random() < 0.5:
                held |= {worker + cast.workers * (number + 1): () for worker in dead}
            try:
                optimizer_after(plan, in_parts).require_all(held, one_node)
                survivors = Survivors(shape, job.chunks, held, plan, plan, job, ARGUMENTS, cast.workers, {}, tuple(
                    shard for shards in copied.values() for shard in shards
                ))  # fmt: skip
                plan, _ = uniform_or_less(survivors)
            except NoPlanError as error:
                lost = lost_parts(plan, held, one_node) if in_parts else lacking(held, LAYERS, False, survivors.copied)
                assert lost or len(held) < cast.replica_size, error
                return
        there = {worker: (*shards, *copied.get(worker, ())) for worker, shards in held.items()}
        held = check_that_none_is_lost(plan, there, job, in_parts)


def changed(asked: ParallelPlan, plan: ParallelPlan, job: JobDescription, held: Held) -> ParallelPlan:
    """A plan that was asked for, as it is run. Raises ChangeRefused or PlanError if it can't be."""
    after = plan_to_change_to(asked, plan, job.chunks, job.tensor_parallel, set(held))
    mode_of(after).check_ops(after, job.chunks, job)
    return after
