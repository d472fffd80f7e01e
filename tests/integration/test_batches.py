# SPDX-License-Identifier: Apache-2.0
"""Jobs whose length and rates are given in samples, and whose batches by a schedule, train as stock Megatron does.

Stock Megatron sets --global-batch-size to something else beside a schedule.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs, ask_for, tiny
from stock_runs import check_like_stock, losses_of, stock_steps
from test_plan_failures import are_heterogeneous
from test_plans import chunks, stages

from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.report.run.summary import compare

SAMPLES: dict[str, Any] = {
    "tensor_model_parallel_size": 2, "train_iters": None, "train_samples": 43, "lr_warmup_iters": None,
    "lr_warmup_samples": 8, "lr_decay_style": "WSD", "lr_decay_samples": 40, "lr_wsd_decay_samples": 24,
    "eval_iters": 1, "eval_interval": 4,
}  # fmt: skip
"""Two replicas of two members, and eleven iterations, of which the last reads one sample more than there are to be."""
SCHEDULE: dict[str, Any] = {"global_batch_size": None, "step_batch_size_schedule": "0:4 2K:8 1B:12"}
"""In tokens: the second step begins after 62 samples."""


@pytest.mark.nightly
def test_a_schedule_of_one_size_trains_as_that_size_does(jobs: Jobs, tmp_path: Path) -> None:
    """Worker 3 dies, the others run one replica of unlike stages, and then two workers the job's own layout."""
    plans = [ParallelPlan((Replica(stages([2], [1, 0]), (0, 1, 2, 3), chunks(1, 4)),), {})]
    plans += [ParallelPlan((Replica(stages([0, 1]), (0, 1, 2, 3), chunks(4)),), {})]
    model = SAMPLES | SCHEDULE
    words = ask_for(tmp_path, *plans, every=3)
    job = jobs.run(tiny(**model, resihp_plan=words, resihp_inject="kill:3@1:backward"), workers=4)
    expected = stock_steps(jobs, 4, **model)
    check_like_stock(job, expected)
    assert len(expected) == 11
    assert are_heterogeneous(job) == [False, False, True, False]
    # The control: with a rate that doesn't decay, losses are others.
    constant = jobs.run(tiny(**model | {"lr_decay_style": "constant"}), workers=4)
    assert (compare(constant.summary.loss, losses_of(expected)) or 0) > 1e-3
