# SPDX-License-Identifier: Apache-2.0
"""What is decided of random plans and deaths, without processes: survivors that hold everything can always go on."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
from chaos_plans import LAYERS, random_plan

from megatron_resihp.control.replanning.change import ChangeRefused, plan_to_change_to
from megatron_resihp.control.replanning.inventory import Survivors, lacking
from megatron_resihp.control.replanning.next_plan import uniform_or_less
from megatron_resihp.plan import Chunk, ParallelPlan, Shard, spelled_out
from megatron_resihp.plan.slices import all_shards, contributors_of, cuts_of, holders_of, plan_moves, slices_of
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
