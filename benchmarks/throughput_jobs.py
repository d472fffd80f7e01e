# SPDX-License-Identifier: Apache-2.0
"""The jobs of throughput.py: how they are laid out, what happens to them, and which strategies plan for them.

Imports `common` and `megatron_resihp`; no torch, no megatron.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from common import EXPERTS, SmallJob, words_of

from megatron_resihp.cost.emulated import cost_on
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.profile import BUILT_IN, DeviceProfile
from megatron_resihp.lab.strategies import FOR_SHARERS as BASELINES
from megatron_resihp.plan import OwnSplit, ParallelPlan, Replica, even_chunks
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import context_degrees, expert_degrees, sharings
from megatron_resihp.planner.strategies.registry import FOR_SHARERS, STRATEGIES, Entry

WORKERS_PER_NODE: Final = 4
MEMORY_SHARE: Final = 0.9
"""The share of the model's state that fits into a device where replicas share nothing: a replica needs two devices."""
HOST: Final = 1 << 40
"""Bytes of host memory for a worker's old state while plans change."""


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        dead: workers that are killed.
        speed, link: what becomes slow.
        sharers: how many replicas must share at least for their experts, or activations, to fit into their devices.
    """

    name: str
    dead: tuple[int, ...] = ()
    speed: dict[int, float] = field(default_factory=dict)
    link: dict[tuple[int, int], float] = field(default_factory=dict)
    sharers: int = 1

    def health(self, workers: int) -> Health:
        speed = {worker: self.speed.get(worker, 1.0) for worker in range(workers) if worker not in self.dead}
        return Health(speed, self.link)

    def injections(self, iteration: int) -> list[str]:
        return [
            *(f"kill:{worker}@{iteration}" for worker in self.dead),
            *(f"slow:{worker}:{speed:g}@{iteration}" for worker, speed in self.speed.items()),
            *(f"link:{first}-{second}:{speed:g}@{iteration}" for (first, second), speed in self.link.items()),
        ]


@dataclass(frozen=True)
class Family:
    """Jobs that differ in nothing but what happens to them.

    Attributes:
        job: without `flags`.
        flags: of Megatron, beside those of `job`, by name.
        cases: what happens.
        strategies: that plan for it, by the names under which they are reported; `joint` among them.
        by_itself: the strategy whose plan the job takes without being asked; "": none.
        sequence: tokens that a sequence stands for.
        context, experts: how many replicas share each sequence, and each layer's experts.
    """

    job: SmallJob
    cases: tuple[Case, ...]
    strategies: Mapping[str, Entry]
    by_itself: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)
    sequence: int = 16384
    context: int = 1
    experts: int = 1

    @property
    def command_job(self) -> SmallJob:
        """The job with all flags."""
        return replace(self.job, more=(*self.job.more, *words_of(self.flags)))

    def profile(self, time_scale: float) -> dict[str, Any]:
        """The emulated device's file."""
        device = json.loads((BUILT_IN / "a100.json").read_text())
        device["links"]["workers_per_node"] = WORKERS_PER_NODE
        return {**device, "time_scale": time_scale, "sequence": self.sequence}

    @cached_property
    def own_plan(self) -> ParallelPlan:
        """The job's first layout, with the data-parallel replicas of a stage beside each other."""
        return self.shared(self.context, self.experts)

    def shared(self, context: int, experts: int) -> ParallelPlan:
        """The first layout with other numbers of replicas that share."""
        job = self.job
        groups = job.replicas // context
        return ParallelPlan(
            tuple(
                Replica(
                    tuple(
                        tuple(job.tensor_parallel * (job.replicas * stage + number) + rank
                              for rank in range(job.tensor_parallel))
                        for stage in range(job.pipeline_parallel)
                    ),
                    tuple(range(number // context, job.batch, groups)),
                    even_chunks(job.layers, job.pipeline_parallel),
                )
                for number in range(job.replicas)
            ),
            context_parallel=context,
            expert_parallel=experts,
        )  # fmt: skip

    def cost(self, time_scale: float, case: Case) -> JobCost:
        """The profile's costs in the planner's form, in seconds of the emulated clock."""
        job = self.job
        arguments = {
            "num_layers": job.layers, "hidden_size": job.hidden, "num_attention_heads": 4, "vocab_size": 127,
            "seq_length": job.sequence, "max_position_embeddings": job.sequence, "transformer_impl": "local",
            "tensor_model_parallel_size": job.tensor_parallel, "hidden_dropout": 0.0, "attention_dropout": 0.0,
            **{name.replace("-", "_"): value for name, value in self.flags.items()},
            "add_bias_linear": "disable-bias-linear" not in self.flags,
        }  # fmt: skip
        own = OwnSplit(self.own_plan.replicas[0].chunks, job.tensor_parallel)
        profile = DeviceProfile.from_dict(self.profile(time_scale))
        cost = cost_on(profile, arguments, own, job.workers, job.batch, memory=0)
        memory = self._memory(cost, case)
        cost = replace(cost, device=replace(cost.device, memory=memory, host=HOST))
        if self.context == self.experts == 1:
            return cost
        contexts = context_degrees(self.context, job.sequence, 1)
        return replace(
            cost,
            sharings=sharings(contexts, expert_degrees(self.experts, cost.model.experts)),
            replica_workers=job.tensor_parallel * job.pipeline_parallel,
        )

    def _memory(self, cost: JobCost, case: Case) -> int:
        training = cost.training
        if self.context == self.experts == 1:
            state = training.weight_bytes + training.gradient_bytes + training.optimizer_bytes
            return int(MEMORY_SHARE * cost.model.parameters * state)
        tightest = self.shared(min(self.context, case.sharers), min(self.experts, case.sharers))
        sharing = tightest.sharing
        cost = cost.shared(sharing.context, sharing.experts)
        return max(use.total for use in memory_of(tightest, cost.model, cost.training).values())


DENSE: Final = Family(
    SmallJob(layers=6, hidden=32, sequence=32, batch=32),
    (
        # Workers 0, 1, 4, 5 are the first stage's, of replica 0 and 1 in pairs.
        Case("one dead", dead=(3,)),
        Case("two dead in one replica", dead=(3, 6)),
        Case("one at 0.5", speed={5: 0.5}),
        Case("two at 0.7 in different replicas", speed={1: 0.7, 6: 0.7}),
        Case("a dead stage", dead=(6, 7)),
        Case("a slow link", link={(0, 4): 0.02}),
    ),
    {name: STRATEGIES[key] for name, key in
     {"drop-replica": "drop-replica", "restart": "restart", "resihp": "resihp-paper", "joint": "joint"}.items()},
    by_itself="drop-replica",
)  # fmt: skip
_OF_SHARERS: Final = {
    "drop-replica": BASELINES["rectangles"],
    "restart": BASELINES["restart"],
    "joint": FOR_SHARERS["by-speed"],
}
_WORKERS: Final = SmallJob(tensor_parallel=1, pipeline_parallel=1, replicas=8, hidden=32, sequence=32)
FAMILIES: Final[Mapping[str, Family]] = {
    "dense": DENSE,
    "moe": Family(
        replace(_WORKERS, layers=4, batch=88),
        (
            # Workers 0 to 3 share experts, and live on one node; so do 4 to 7.
            Case("one dead", dead=(3,)),
            Case("two dead in one EP group", dead=(1, 2)),
            Case("one at 0.5", speed={5: 0.5}),
            Case("a dead node", dead=(4, 5, 6, 7)),
            Case("one dead, room for half of the experts", dead=(3,), sharers=2),
            Case("two dead in one EP group, room for half of the experts", dead=(1, 2), sharers=2),
            Case("one at 0.5, room for half of the experts", speed={5: 0.5}, sharers=2),
        ),
        {**_OF_SHARERS, "lazarus": BASELINES["lazarus"]},
        flags={**EXPERTS, "expert-model-parallel-size": 4},
        sequence=8192,
        experts=4,
    ),
    "long": Family(
        replace(_WORKERS, layers=2, batch=30),
        (
            # Workers 0 to 3 share sequences, and live on one node; so do 4 to 7.
            Case("one dead", dead=(3,)),
            Case("two dead in one CP group", dead=(1, 2)),
            Case("one at 0.5", speed={5: 0.5}),
            Case("a dead node", dead=(4, 5, 6, 7)),
            Case("one dead, room for half of a sequence", dead=(3,), sharers=2),
        ),
        _OF_SHARERS,
        flags={"context-parallel-size": 4},
        sequence=32768,
        context=4,
    ),
}  # fmt: skip
