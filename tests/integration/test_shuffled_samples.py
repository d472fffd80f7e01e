# SPDX-License-Identifier: Apache-2.0
"""Shuffled samples (`--dataloader-type cyclic`), whose order in Megatron follows from the number of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs, ask_for, tiny
from stock_runs import check_like_stock, stock_steps
from test_plans import chunks, stages

from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.report.run.summary import compare

SHUFFLED: dict[str, Any] = {
    "dataloader_type": "cyclic", "tensor_model_parallel_size": 1, "global_batch_size": 8, "train_iters": 11,
    "eval_iters": 2, "eval_interval": 4, "split": "80,20,0",
}  # fmt: skip

UNEQUAL = ParallelPlan(
    (Replica(stages([2]), (0, 1, 2, 3, 4), chunks(4)), Replica(stages([1], [0]), (5, 6, 7), chunks(2, 4))), {}
)
THREE = ParallelPlan(tuple(Replica(stages([worker]), tuple(range(worker, 8, 3))) for worker in range(3)), {})


@pytest.mark.nightly
@pytest.mark.parametrize("readers", [0, 1])
def test_samples_come_in_megatrons_order_through_a_death(jobs: Jobs, tmp_path: Path, readers: int) -> None:
    """Four replicas, of which one dies; then two with unequal shares, and three."""
    model = SHUFFLED | {"num_workers": readers}
    stock = stock_steps(jobs, 4, **model)
    words = ask_for(tmp_path, UNEQUAL, THREE)
    job = jobs.run(tiny(**model, resihp_plan=words, resihp_inject="kill:3@1:backward"), workers=4)
    check_like_stock(job, stock)
    assert (job.summary.samples_lost, job.summary.samples_applied_twice, job.summary.samples_out_of_place) == (0, 0, 0)
    # The control: samples in sequence train something else.
    sequence = jobs.reference(tiny(**model | {"dataloader_type": "single"}), workers=4)
    assert (compare(sequence.summary.loss, job.summary.loss) or 0) > 1e-3
    assert len(job.events("reconfiguration")) == 2
