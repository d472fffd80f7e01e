# SPDX-License-Identifier: Apache-2.0
"""Jobs with Muon, which orthogonalises each matrix as it is cut: they go on in the same cuts, whatever the layers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from jobs import EXPERTS, FP32, Jobs, ask_at, check_training, tiny
from stock_runs import check_like_stock, stock_steps
from test_interleaved import UNLIKE, own_plan
from test_plan_failures import are_heterogeneous
from test_plans import stages
from test_query_groups import plan

from megatron_resihp.report.run.summary import compare

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("emerging_optimizers") is None,
        reason="emerging-optimizers is not installed: Megatron takes Muon from it",
    ),
]

MUON: dict[str, Any] = {
    "optimizer": "muon", "muon_momentum": 0.8, "muon_nesterov": True, "muon_tp_mode": "blockwise",
    "muon_fp32_matmul_prec": "high", "weight_decay": 0.1, "lr": "1e-2", "min_lr": "1e-3",
}  # fmt: skip
"""In 32 bits throughout; by default it orthogonalises in 16, which makes rounding's differences larger."""
OTHERWISE: dict[str, Any] = {
    "muon_no_split_qkv": True, "muon_scale_mode": "unit_rms_norm", "muon_coefficient_type": "polar_express",
    "muon_num_ns_steps": 6, "muon_extra_scale_factor": 0.2, "muon_scalar_optimizer": "adam",
    "group_query_attention": True, "num_query_groups": 2, "swiglu": True, "ffn_hidden_size": 64,
}  # fmt: skip
STAGES: dict[str, Any] = {
    "num_layers": 4, "pipeline_model_parallel_size": 2, "global_batch_size": 8, "train_iters": 11,
}  # fmt: skip
MEMBERS: dict[str, Any] = {"tensor_model_parallel_size": 2, "global_batch_size": 2, "train_iters": 8}
SAVED = 7


@pytest.mark.parametrize("model", [{}, OTHERWISE, EXPERTS], ids=["plain", "otherwise", "experts"])
def test_a_death_and_other_stages(jobs: Jobs, tmp_path: Path, model: dict[str, Any]) -> None:
    """A worker dies, two replicas of unlike stages go on, then one of the job's own; as stock Megatron trains it."""
    model = MUON | STAGES | model
    words = ask_at(tmp_path, (UNLIKE, 5), (own_plan((0, 3)), 8))
    job = jobs.run(tiny(**model, resihp_plan=words, resihp_inject="kill:2@3:backward"), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4))
    assert are_heterogeneous(job) == [False, False, True, False]
    check_like_stock(job, stock_steps(jobs, 4, **model))
    # The control: with another momentum of Muon losses are others.
    other = jobs.run(tiny(**model | {"muon_momentum": 0.5}), workers=4)
    assert (compare(job.summary.loss, other.summary.loss) or 0) > 10 * FP32.loss


def test_a_death_among_members_and_no_other_degree(jobs: Jobs, tmp_path: Path) -> None:
    """A plan that cuts matrices otherwise is refused, and says why; the job's own degree goes on."""
    model = MUON | MEMBERS
    words = ask_at(tmp_path, (plan(stages([2], [1, 0])), 4))
    job = jobs.run(tiny(**model, resihp_plan=words, resihp_inject="kill:3@2:step"), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4))
    assert are_heterogeneous(job) == [False, False]
    [refused] = job.events("change_refused")
    assert refused["reason"] == (
        "each stage needs the job's own number of TP members, 2: Muon orthogonalises the part of a matrix that a "
        "member holds"
    )
    check_like_stock(job, stock_steps(jobs, 4, **model))


def test_what_unlike_stages_save_is_loaded(jobs: Jobs, tmp_path: Path) -> None:
    model = MUON | STAGES
    saving = {"save": tmp_path / "saved", "save_interval": SAVED, "exit_interval": SAVED}
    saved = jobs.run(tiny(**model | saving, resihp_plan=ask_at(tmp_path, (UNLIKE, 4))), workers=4)
    assert saved.code == 0 and are_heterogeneous(saved) == [False, True], saved.tails()
    job = jobs.run(tiny(**model, load=tmp_path / "saved"), workers=4)
    assert job.code == 0, job.tails()
    expected = jobs.reference(tiny(**model), workers=4).summary.loss
    assert job.summary.loss == pytest.approx({n: loss for n, loss in expected.items() if n > SAVED}, rel=1e-5)
