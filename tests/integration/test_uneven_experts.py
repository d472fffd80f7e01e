# SPDX-License-Identifier: Apache-2.0
"""Experts that are dealt in unequal numbers: of four workers that share eight, three share them as 3, 3 and 2, and the
job trains what Megatron itself trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import FP32, Job, Jobs, Tolerance, ask_at, check_samples, tiny
from stock_runs import check_like_stock, forked_stock_steps
from test_expert_parallelism import GATHERED, OPTIMIZER, SHARED

from megatron_resihp.plan import ParallelPlan, Replica

pytestmark = pytest.mark.nightly

WORKERS, EXPERTS = 4, 8
SHARED_BY_ALL: dict[str, Any] = SHARED | {"num_experts": EXPERTS, "expert_model_parallel_size": WORKERS}


def shared_by(degree: int) -> ParallelPlan:
    """As many workers as share all experts, with all micro-batches between them."""
    dealt = (tuple(range(index, SHARED["global_batch_size"], degree)) for index in range(degree))
    replicas = tuple(Replica(((worker,),), numbers) for worker, numbers in enumerate(dealt))
    return ParallelPlan(replicas, expert_parallel=degree, uneven_experts=EXPERTS if EXPERTS % degree else 0)


def degrees(job: Job) -> list[tuple[int, int]]:
    """Of each epoch: how many replicas share experts, and how many experts are dealt in unequal numbers."""
    plans = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    return [(plan.expert_parallel, plan.uneven_experts) for plan in plans]


@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [({}, FP32), (GATHERED, FP32), (OPTIMIZER, FP32)],
    ids=["all to all", "gathered", "optimizer"],
)
def test_a_change_there_and_back(jobs: Jobs, tmp_path: Path, layout: dict[str, Any], tolerance: Tolerance) -> None:
    layout = SHARED_BY_ALL | layout
    stock = forked_stock_steps(jobs, WORKERS, **layout)
    asked = ask_at(tmp_path, (shared_by(3), 2), (shared_by(4), 6))
    job = jobs.run(tiny(**layout, resihp_plan=asked), workers=WORKERS)
    check_like_stock(job, stock, tolerance)
    check_samples(job)
    assert degrees(job) == [(4, 0), (3, 8), (4, 0)]
