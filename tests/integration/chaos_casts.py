# SPDX-License-Identifier: Apache-2.0
"""The jobs of test_chaos.py: their models, workers, and how these share experts and sequences. Starts no processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs import BF16, EXPERTS, FP32, Tolerance
from test_plans import LLAMA, UNIFORM_LAYOUT

from megatron_resihp.config import INJECTION_POINTS
from megatron_resihp.plan.rules import Sharing

ITERATIONS = 14
LAYERS = 6
"""Embedding and head included."""
MIGRATING = "recovery-migrate"
SHARED_EXPERTS = ("dispatch", "combine", "combine-backward", "dispatch-backward")
SHARED_SEQUENCES = ("context", "context-backward")
"""Where those that share them meet."""


@dataclass(frozen=True)
class Cast:
    """A job to which things happen.

    Attributes:
        workers: at the start.
        micro_batches: of a global batch.
        model: arguments that differ from those of `tiny`.
        most_deaths: after which nobody is killed any more, where nobody comes back.
    """

    workers: int
    micro_batches: int
    model: Mapping[str, Any]
    most_deaths: int

    @property
    def tensor(self) -> int:
        return int(self.model.get("tensor_model_parallel_size", 1))

    @property
    def pipeline(self) -> int:
        return int(self.model.get("pipeline_model_parallel_size", 1))

    @property
    def replica_size(self) -> int:
        """Workers of a replica of the job's own layout."""
        return self.tensor * self.pipeline

    @property
    def sharing(self) -> Sharing:
        """How many replicas share sequences and experts, and how many members of a stage have the same experts."""
        experts = self.model.get("expert_model_parallel_size", 1)
        members = self.model.get("expert_tensor_parallel_size", self.tensor)
        context = self.model.get("context_parallel_size", 1)
        return Sharing(context, experts * members // self.tensor, 0 if members == self.tensor else members)

    @property
    def shares(self) -> bool:
        """Whether workers share experts or sequences, so that all plans are uniform ones."""
        return self.sharing != Sharing()

    @property
    def uneven(self) -> int:
        """How many experts a layer has, if they may be dealt in unequal numbers; 0: they may not."""
        context, sharers, members, _ = self.sharing
        return int(self.model["num_experts"]) if sharers > 1 and context == 1 and not members else 0

    @property
    def together(self) -> int:
        """Workers of the smallest job of the same degrees."""
        return self.replica_size * self.sharing.together

    @property
    def dealt(self) -> int:
        """So many micro-batches go to a replica at a time: an interleaved pipeline needs one for each stage."""
        return self.pipeline if "num_layers_per_virtual_pipeline_stage" in self.model else 1

    @property
    def tolerance(self) -> Tolerance:
        return BF16 if self.model.get("bf16") else FP32

    @property
    def points(self) -> tuple[str, ...]:
        """Where fault injections can strike."""
        missing = {"save"} if "eval_interval" in self.model else {"save", "evaluate"}
        missing |= {point for point in SHARED_EXPERTS if self.sharing.experts == 1}
        missing |= {point for point in SHARED_SEQUENCES if self.sharing.context == 1}
        return tuple(point for point in INJECTION_POINTS if point not in missing and point != MIGRATING)

    def arguments(self) -> dict[str, Any]:
        sizes = {"num_layers": LAYERS - 2, "global_batch_size": self.micro_batches, "train_iters": ITERATIONS}
        return {**self.model, **sizes}


PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EVALUATING: dict[str, Any] = {"eval_interval": 5, "eval_iters": 1}

DENSE = Cast(8, 8, UNIFORM_LAYOUT, most_deaths=3)
MIXTURE = Cast(8, 8, UNIFORM_LAYOUT | EXPERTS | {"sequence_parallel": True}, most_deaths=3)
LLAMAS = Cast(12, 12, UNIFORM_LAYOUT | LLAMA | {"sequence_parallel": True}, most_deaths=5)
"""Its two query groups may have four tensor-parallel ranks."""
REPLICAS = Cast(10, 10, PIPELINE | EVALUATING, most_deaths=4)
CASTS = (DENSE, LLAMAS, REPLICAS, DENSE, MIXTURE, DENSE, REPLICAS, LLAMAS)


# ---- jobs that share experts, sequences or both


TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
INTERLEAVED: dict[str, Any] = PIPELINE | {"num_layers_per_virtual_pipeline_stage": 1}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}
HALF: dict[str, Any] = {"bf16": True, "moe_router_dtype": "fp32"}
SEQUENCES: dict[str, Any] = {"context_parallel_size": 2}


def experts(degree: int, cuts: int = 1, dispatcher: str = "alltoall") -> dict[str, Any]:
    """Experts that so many workers share. `cuts`: into how many each is cut."""
    degrees = {"expert_model_parallel_size": degree, "expert_tensor_parallel_size": cuts}
    return EXPERTS | degrees | {"moe_token_dispatcher_type": dispatcher}


def eight(*parts: Mapping[str, Any]) -> Cast:
    """A job of eight workers."""
    model = {name: value for part in parts for name, value in part.items()}
    return Cast(8, 8, model, most_deaths=3)


TWICE = eight(experts(2), PIPELINE, EVALUATING)
ONCE = eight(experts(4), PIPELINE)
"""Each expert lives once, and another worker has a copy of it."""
CUT = eight(experts(2, cuts=2), TENSOR)
CUT_ONCE = eight(experts(4, cuts=2, dispatcher="allgather"), TENSOR)
WHOLE = eight(experts(4), TENSOR, OVERLAP)
"""Members of a stage have other experts each, and two replicas share them."""
TURNS = eight(experts(2), INTERLEAVED)
LONG = eight(SEQUENCES, PIPELINE, EVALUATING)
LONG_TENSOR = eight(SEQUENCES, TENSOR, OVERLAP)
BOTH = eight(experts(2), SEQUENCES, PIPELINE)
BOTH_ONCE = eight(experts(4), SEQUENCES, PIPELINE)
BOTH_WHOLE = eight(experts(2), SEQUENCES, TENSOR)
"""The members of a stage have all experts between them."""
HALVES = Cast(4, 8, experts(2) | HALF, most_deaths=2)
LONG_HALVES = Cast(4, 8, experts(2) | SEQUENCES | HALF | OVERLAP, most_deaths=2)
QUARTERS = Cast(4, 8, experts(4) | {"num_experts": 8}, most_deaths=2)
"""Three have 3, 3 and 2."""
SHARING_CASTS = (
    QUARTERS, TWICE, LONG, BOTH, CUT, ONCE, LONG_TENSOR, HALVES, WHOLE, BOTH_ONCE, TURNS, CUT_ONCE, LONG_HALVES,
    BOTH_WHOLE,
)  # fmt: skip
