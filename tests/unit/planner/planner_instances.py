# SPDX-License-Identifier: Apache-2.0
"""Jobs, plans and healths that the tests of planning share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import strategies as st

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import Recompute, Training
from megatron_resihp.plan import Chunk, ParallelPlan
from megatron_resihp.planner import JobShape, initial_plan
from megatron_resihp.planner.health import Health

TENSOR_EFFICIENCY = {1: 1.0, 2: 0.93, 4: 0.85, 8: 0.75}


def job(
    layers: int = 12,
    micro_batches: int = 8,
    workers_per_node: int = 4,
    memory: int = 80 * 2**30,
    bandwidth: float = 25e9,
) -> JobCost:
    """A LLaMA-2 7B of so many decoder layers on A100-like devices."""
    return JobCost(
        model_from_arguments({**PRESETS["llama2-7b"], "num_layers": layers}),
        Training(4096, recompute=Recompute.SELECTIVE, sequence_parallel=True, distributed_optimizer=True),
        Device(312e12, 0.5, TENSOR_EFFICIENCY, memory, latency=1e-5, bandwidth=bandwidth),
        micro_batches=micro_batches,
        workers_per_node=workers_per_node,
    )


def first_plan(cost: JobCost, tensor: int, replicas: int, pipeline: int) -> ParallelPlan:
    """Megatron's own layout, each stage with as many decoder layers as can be, the first ones with more."""
    shape = JobShape(tensor, pipeline, cost.micro_batches, cost.workers_per_node)
    plan = initial_plan(shape, tensor * replicas * pipeline)
    each, more = divmod(cost.layers - 2, pipeline)
    counts = [each + (stage < more) + (stage == 0) + (stage == pipeline - 1) for stage in range(pipeline)]
    ends = [sum(counts[:stage]) for stage in range(pipeline + 1)]
    chunks = tuple(Chunk(stage, *ends[stage : stage + 2]) for stage in range(pipeline))
    return ParallelPlan(tuple(replace(replica, chunks=chunks) for replica in plan.replicas))


def healthy(plan: ParallelPlan, dead: tuple[int, ...] = (), slow: Mapping[int, float] | None = None) -> Health:
    """Everybody of a plan at full speed but for those who are dead or slow."""
    return Health({worker: (slow or {}).get(worker, 1.0) for worker in plan.members if worker not in dead})


@st.composite
def jobs(draw: st.DrawFn) -> tuple[JobCost, ParallelPlan]:
    """A small job in its first plan: up to 32 workers; tensor-parallel groups lie inside nodes."""
    tensor = draw(st.sampled_from([1, 2, 4]))
    replicas, pipeline = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    cost = job(
        layers=draw(st.integers(4, 12)),
        micro_batches=replicas * draw(st.integers(1, 4)),
        workers_per_node=tensor * draw(st.integers(1, 2)),
        memory=draw(st.sampled_from([20, 40, 80])) * 2**30,
    )
    return cost, first_plan(cost, tensor, replicas, pipeline)


@st.composite
def situations(draw: st.DrawFn) -> tuple[ParallelPlan, Health, JobCost]:
    """A small job in its first plan, some of whose workers are dead, some slow, some links slow."""
    cost, plan = draw(jobs())
    speeds = st.sampled_from([None, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.5, 0.2])
    speed = {worker: draw(speeds) for worker in plan.members}
    links = st.tuples(*[st.sampled_from(plan.members)] * 2).filter(lambda pair: pair[0] < pair[1])
    link = draw(st.dictionaries(links, st.sampled_from([0.5, 0.1]), max_size=3)) if len(plan.members) > 1 else {}
    return plan, Health({worker: p for worker, p in speed.items() if p is not None}, link), cost


def relabelled(plan: ParallelPlan, label: Mapping[int, int]) -> ParallelPlan:
    """The same plan for workers of other names."""
    replicas = tuple(
        replace(replica, stages=tuple(tuple(label[worker] for worker in members) for members in replica.stages))
        for replica in plan.replicas
    )
    return replace(plan, replicas=replicas, standbys={label[worker]: kept for worker, kept in plan.standbys.items()})


def relabelled_health(health: Health, label: Mapping[int, int]) -> Health:
    """The same health for workers of other names."""
    link = {(min(label[a], label[b]), max(label[a], label[b])): speed for (a, b), speed in health.link.items()}
    return Health({label[worker]: speed for worker, speed in health.speed.items()}, link)
