# SPDX-License-Identifier: Apache-2.0
"""Plans for survivors that hold all state between them, and are too few for one replica of the job's own layout.

Simple ones, which are to keep a job alive and not to be the fastest. Pure; may import `plan`, `cost` and other pure
modules of `control.replanning`. `cost` is imported only once such a plan is needed, since that takes a while.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from megatron_resihp.control.replanning.change import with_standbys
from megatron_resihp.control.replanning.modes import mode_of
from megatron_resihp.control.replanning.recovery.inventory import Held, Survivors
from megatron_resihp.plan import Chunk, ParallelPlan, PlanError, Replica, deal, even_counts, spelled_out
from megatron_resihp.plan.layers import in_turns
from megatron_resihp.planner import NoPlanError


def plan_for_few(survivors: Survivors) -> ParallelPlan:
    """What is left of the plan that was run, or else one pipeline of all survivors, whichever fits in memory first.

    The survivors hold all state between them.

    Raises:
        NoPlanError: neither fits, or too little is known of the job to tell; without a message if the job could not
            run either, whatever its memory.
    """
    own, held, job, reason = survivors.own, survivors.held, survivors.job, ""
    for working in _candidates(own, held, survivors.running, job.micro_batches):
        plan = with_standbys(working, held, own, job.tensor_parallel)
        if plan.not_uniform and (job.context_parallel > 1 or job.expert_parallel > 1 or job.expert_members):
            continue  # such a job never runs it
        try:
            mode_of(plan).check_ops(plan, own, job)
            _check_memory(plan, survivors)
        except PlanError as error:
            reason = str(error)
        else:
            return plan
    raise NoPlanError(reason)


def _candidates(
    own: tuple[Chunk, ...], held: Held, running: ParallelPlan | None, micro_batches: int
) -> Iterator[ParallelPlan]:
    left = [] if running is None else _whole_replicas(spelled_out(running, own), held)[:micro_batches]
    if left:
        shares = deal(even_counts(micro_batches, len(left)))
        yield ParallelPlan(tuple(replace(each, micro_batches=share) for each, share in zip(left, shares, strict=True)))
    yield ParallelPlan((_one_pipeline(own[-1].end, held, micro_batches),))


def _whole_replicas(running: ParallelPlan, held: Held) -> list[Replica]:
    """Replicas whose members are all alive and that Megatron's own order of ops can run: listed ops go with the
    micro-batches and the other replicas that there were."""
    return [
        replace(replica, schedule=None)
        for replica in running.replicas
        if all(replica.stages)
        and in_turns(replica.stage_of_chunk, len(replica.stages))
        and all(worker in held for members in replica.stages for worker in members)
    ]


def _one_pipeline(layers: int, held: Held, micro_batches: int) -> Replica:
    """A stage for each survivor, with about as many layers each: so each needs the least memory. They are in the order
    of the layers that they hold, to move little."""
    stages = sorted(held, key=lambda worker: (not held[worker], _middle(held, worker), worker))[:layers]
    ends = accumulate(even_counts(layers, len(stages)), initial=0)
    chunks = tuple(Chunk(stage, *layers) for stage, layers in enumerate(pairwise(ends)))
    return Replica(tuple((worker,) for worker in stages), tuple(range(micro_batches)), chunks)


def _middle(held: Held, worker: int) -> float:
    layers = [layer for shard in held[worker] for layer in range(shard.first, shard.end)]
    return sum(layers) / max(len(layers), 1)


def _check_memory(plan: ParallelPlan, survivors: Survivors) -> None:
    """Raises PlanError unless the plan fits into the devices' memory, and NoPlanError where that can't be told.

    Nothing is kept in reserve: without this plan the job ends.
    """
    from megatron_resihp.cost.memory import check_plan
    from megatron_resihp.cost.running import UnknownCost, cost_of_job

    try:
        known = replace(survivors.known, memory_reserve=0.0)
        cost = cost_of_job(known, survivors.slots, survivors.shape.workers_per_node, survivors.own, None)
    except UnknownCost as error:
        raise NoPlanError(str(error)) from None
    check_plan(spelled_out(plan, survivors.own), cost.model, cost.training.as_plans_say(), cost.device.memory)
