# SPDX-License-Identifier: Apache-2.0
"""More tensor-parallel members than query groups.

Megatron cuts the weights of queries, keys and values evenly all the same, so that a member may have those of keys and
values only, or of a head and a half; what members make with them is gathered, and each takes what its heads need.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Jobs, ask_for, check_training, tiny
from test_plan_failures import are_heterogeneous
from test_plans import PER_TOKEN, chunks, stages
from test_there_and_back import GROUPED

from megatron_resihp.plan import ParallelPlan, Replica

NIGHTLY = pytest.mark.nightly
FOUR: dict[str, Any] = GROUPED | {"tensor_model_parallel_size": 4, "global_batch_size": 2, "train_iters": 11}
"""Four heads of queries in two groups, and four members in each replica; layers 0 to 3."""
TWO: dict[str, Any] = FOUR | {"tensor_model_parallel_size": 2, "num_query_groups": 1}
"""One group, and two members."""


def plan(*replicas: tuple[tuple[int, ...], ...]) -> ParallelPlan:
    """Replicas of a micro-batch each, or a single one of both: with two stages, which part in the middle, or one."""
    shares = ((0, 1),) if len(replicas) == 1 else ((0,), (1,))
    ends = {1: (4,), 2: (2, 4)}
    return ParallelPlan(
        tuple(Replica(each, share, chunks(*ends[len(each)])) for each, share in zip(replicas, shares, strict=True)), {}
    )


def survive(
    jobs: Jobs, path: Path, plans: Sequence[ParallelPlan], *, model: dict[str, Any], workers: int, **injection: Any
) -> Job:
    reference = jobs.reference(tiny(**model), workers=workers)
    job = jobs.run(tiny(**model, resihp_plan=ask_for(path, *plans, every=2), **injection), workers=workers)
    check_training(job, reference)
    return job


@NIGHTLY
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"sequence_parallel": True} | PER_TOKEN,
        {"num_query_groups": 1, "qk_layernorm": True, "disable_bias_linear": None},
    ],
    ids=["plain", "sequence parallel, per token", "one group, norms, biases"],
)
def test_from_plan_to_plan_and_back(jobs: Jobs, tmp_path: Path, model: dict[str, Any]) -> None:
    plans = [plan(stages([1, 0], [2])), plan(stages([3]), stages([0, 2])), plan(stages([0, 1, 2, 3]))]
    job = survive(jobs, tmp_path, plans, model=FOUR | model, workers=4)
    assert are_heterogeneous(job) == [False, True, True, False]


@NIGHTLY
def test_a_death_and_other_degrees(jobs: Jobs, tmp_path: Path) -> None:
    """A replica dies with worker 5; then groups of two and one and again of four go on, each in unlike company."""
    plans = [plan(stages([6, 0], [1]), stages([7, 4, 2, 3])), plan(stages([0, 1, 2, 3]))]
    model = FOUR | {"sequence_parallel": True, "qk_layernorm": True}
    job = survive(jobs, tmp_path, plans, model=model, workers=8, resihp_inject="kill:5@1:backward")
    assert are_heterogeneous(job) == [False, False, True, False]


@NIGHTLY
@pytest.mark.parametrize("point", ["backward", "step"])
def test_a_death_where_there_is_one_group(jobs: Jobs, tmp_path: Path, point: str) -> None:
    plans = [plan(stages([2], [1, 0])), plan(stages([0, 1]))]
    job = survive(jobs, tmp_path, plans, model=TWO, workers=4, resihp_inject=f"kill:3@1:{point}")
    assert are_heterogeneous(job) == [False, False, True, False]


@NIGHTLY
def test_a_degree_that_groups_do_not_go_with_is_refused(jobs: Jobs, tmp_path: Path) -> None:
    """By the coordinator, before anybody leaves the plan in force."""
    sizes = {"num_attention_heads": 6, "hidden_size": 48, "ffn_hidden_size": 96, "make_vocab_size_divisible_by": 96}
    model = FOUR | sizes | {"tensor_model_parallel_size": 2}
    job = survive(jobs, tmp_path, [plan(stages([2, 1, 0]))], model=model, workers=4)
    [refused] = job.events("change_refused")
    assert refused["reason"].startswith("3 TP members can't share 2 query groups; ask for")
