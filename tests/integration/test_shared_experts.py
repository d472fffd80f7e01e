# SPDX-License-Identifier: Apache-2.0
"""Shared experts that are computed while tokens cross to others (--moe-shared-expert-overlap): whatever becomes of a
job, it trains what stock Megatron trains with that flag.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import EXPERTS, Jobs, ask_for, check_training, tiny
from stock_runs import check_like_stock, check_that_training_shows, like_stock_and_back, stock_steps
from test_expert_parallelism import OPTIMIZER, SHARED, TENSOR, degrees
from test_flags import TWO
from test_plan_failures import are_heterogeneous
from test_plans import chunks, explicit, stages
from test_query_groups import plan

from megatron_resihp.plan import ParallelPlan, Replica

pytestmark = pytest.mark.nightly

OVERLAPPED: dict[str, Any] = EXPERTS | {
    "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True, "moe_shared_expert_overlap": True,
    "moe_token_dispatcher_type": "alltoall", "swiglu": True, "sequence_parallel": True,
}  # fmt: skip


def test_a_death_and_other_degrees(jobs: Jobs, tmp_path: Path) -> None:
    """Also in a plan that computes weight gradients later than the rest."""
    apart = Replica(stages([2], [1, 0]), (0, 1), chunks(2, 4), explicit((0, 1), 2, (0, 1), weights=True))
    asked = ask_for(tmp_path, ParallelPlan((apart,), {}), plan(stages([0, 1])))
    model = TWO | OVERLAPPED
    job = jobs.run(tiny(**model, resihp_plan=asked, resihp_inject="kill:3@1:backward"), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4))
    check_like_stock(job, stock_steps(jobs, 4, **model))
    assert are_heterogeneous(job) == [False, False, True, False]
    check_that_training_shows(jobs, 4, model)


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [({"sequence_parallel": None}, (4, 3)), (TENSOR | OPTIMIZER, (2, 1))],
    ids=["plain", "tensor"],
)
def test_a_death_and_the_return_of_a_worker_that_shares_experts(
    jobs: Jobs, layout: dict[str, Any], replicas: tuple[int, int]
) -> None:
    """Without it replicas have all experts each, and nothing crosses between them."""
    all_replicas, left = replicas
    layout = SHARED | OVERLAPPED | {"train_iters": 14} | layout
    job = like_stock_and_back(jobs, layout=layout, kill="kill:3@3:backward")
    assert degrees(job) == [(2, all_replicas), (1, left), (2, all_replicas)]
