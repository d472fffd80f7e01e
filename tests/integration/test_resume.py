# SPDX-License-Identifier: Apache-2.0
"""A resumed job starts its detector from the cost model that an earlier run has saved, and keeps the optimizer's
settings of its checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from jobs import FP32, Jobs, tiny

from megatron_resihp.detector.judging.learned import load

LEARNED, AGAIN = 60, 15
SAVED = 4
LARGER = 8
"""Samples of a batch; elsewhere they are 4."""
MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": 16, "lr": "1e-2", "min_lr": "1e-3", "train_iters": 10}
MUON: dict[str, Any] = {
    "optimizer": "muon", "muon_tp_mode": "blockwise", "muon_fp32_matmul_prec": "high", "lr": "1e-2", "min_lr": "1e-3",
    "train_iters": 10,
}  # fmt: skip
NEEDS_MUON = pytest.mark.skipif(
    importlib.util.find_spec("emerging_optimizers") is None, reason="Megatron takes Muon from emerging-optimizers"
)


@pytest.mark.nightly
def test_a_job_saves_its_costs_and_another_starts_from_them(jobs: Jobs, tmp_path: Path) -> None:
    first = jobs.start(tiny(train_iters=LEARNED), workers=2).wait()
    assert first.code == 0, first.tails()
    path = first.run_dir / "cost_model.json"
    model = load(path).model
    assert model.iteration_mape > 0 and model.terms["optimizer"] > 0

    second = jobs.start(tiny(train_iters=AGAIN, resihp_cost_model=path), workers=2).wait()
    assert second.code == 0, second.tails()
    (told,) = second.events("detection_resumed")
    assert told["path"] == str(path) and told["iteration"] < AGAIN

    cut = tmp_path / "cut.json"
    cut.write_text(path.read_text()[:1000])
    refused = jobs.start(tiny(train_iters=AGAIN, resihp_cost_model=cut), workers=2).wait()
    assert refused.code and f"--resihp-cost-model {cut} is not JSON" in refused.tails()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "saved_with", "resumed_with"),
    [
        (MUP, {"adam_eps": 1e-3}, {"adam_eps": 1e-8}),
        pytest.param(MUON, {"muon_momentum": 0.9}, {"muon_momentum": 0.1}, marks=NEEDS_MUON),
    ],
    ids=["muP", "Muon"],
)
def test_a_death_does_not_change_what_the_optimizer_has_from_the_checkpoint(
    jobs: Jobs, tmp_path: Path, model: dict[str, Any], saved_with: dict[str, Any], resumed_with: dict[str, Any]
) -> None:
    """Megatron goes on with the checkpoint's momentum, or eps of each kind of parameter, whatever the flags say."""
    saving = {"save": tmp_path, "save_interval": SAVED, "exit_interval": SAVED}
    saved = jobs.run(tiny(**model | saved_with | saving), workers=2)
    assert saved.code == 0, saved.tails()
    resumed = model | resumed_with | {"load": tmp_path}
    undisturbed = jobs.run(tiny(**resumed), workers=2)
    job = jobs.run(tiny(**resumed, resihp_inject="kill:1@6:backward"), workers=2)
    assert job.code == 0 and job.summary.deaths, job.tails()
    assert undisturbed.summary.loss and job.summary.loss == pytest.approx(undisturbed.summary.loss, rel=FP32.loss)


@pytest.mark.nightly
def test_samples_are_counted_on_from_a_checkpoint_of_smaller_batches(jobs: Jobs, tmp_path: Path) -> None:
    """Iterations of other sizes don't look like samples that were lost or come twice."""
    saved = jobs.run(tiny(save=tmp_path, save_interval=SAVED, exit_interval=SAVED), workers=2)
    assert saved.code == 0, saved.tails()
    resumed = {"load": tmp_path, "override_opt_param_scheduler": True, "global_batch_size": LARGER}
    job = jobs.run(tiny(**resumed, resihp_inject="kill:1@6:backward"), workers=2)
    assert job.code == 0 and job.summary.deaths, job.tails()
    found = job.summary
    assert found.samples_consumed == (found.iterations - SAVED) * LARGER
    assert (found.samples_lost, found.samples_applied_twice, found.samples_out_of_place) == (0, 0, 0)
