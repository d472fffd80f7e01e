# SPDX-License-Identifier: Apache-2.0
"""Experts that Megatron computes by Transformer Engine's op fuser, with ops that are made once, around parameters.

fused_ops_gpt.py has such ops on any device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import BF16, EXPERTS, FP32, Jobs, ask_at, check_samples, tiny
from stock_runs import check_like_stock, like_stock_and_back, stock_steps
from test_expert_parallelism import OPTIMIZER, SHARED, SINKHORN
from test_plans import chunks, stages

from megatron_resihp.plan import ParallelPlan, Replica

pytestmark = pytest.mark.nightly

FUSED = Path(__file__).with_name("fused_ops_gpt.py")
OPS: dict[str, Any] = {"moe_grouped_gemm": True, "use_transformer_engine_op_fuser": True, "swiglu": True}
GATHERED: dict[str, Any] = OPTIMIZER | {"overlap_param_gather": False}
LAYOUT: dict[str, Any] = EXPERTS | SINKHORN | OPS | {"train_iters": 14}


@pytest.mark.parametrize(
    "layout",
    [{}, {"bf16": True}, GATHERED, SHARED | OPS | GATHERED | {"train_iters": 14}],
    ids=["plain", "bf16", "optimizer", "shared experts, optimizer"],
)
def test_a_death_and_the_return_of_the_worker(jobs: Jobs, layout: dict[str, Any]) -> None:
    like_stock_and_back(jobs, layout=LAYOUT | layout, script=FUSED, tolerance=BF16 if "bf16" in layout else FP32)


@pytest.mark.parametrize("layout", [{}, GATHERED], ids=["plain", "optimizer"])
def test_layers_on_other_workers(jobs: Jobs, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Two pipelines of other lengths; then a worker dies."""
    layout = LAYOUT | layout
    plan = ParallelPlan(
        (
            Replica(stages([0], [1], [2]), (0, 1), chunks(1, 2, 4)),
            Replica(stages([3]), (2, 3), chunks(4)),
        ),
        {},
    )
    stock = stock_steps(jobs, 4, FUSED, **layout)
    asked = {"resihp_plan": ask_at(tmp_path, (plan, 3)), "resihp_inject": "kill:2@7:backward"}
    job = jobs.run(tiny(**layout, **asked), workers=4, script=FUSED)
    assert job.code == 0, job.tails()
    check_like_stock(job, stock)
    check_samples(job)
    assert len(job.events("reconfiguration")) == 1 and len(job.summary.deaths) == 1
