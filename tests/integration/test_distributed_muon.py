# SPDX-License-Identifier: Apache-2.0
"""Jobs whose replicas share out Muon's matrices: the momentum of each outlives its owner, in a copy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from jobs import BF16, Job, Jobs, Tolerance, ask_at, ask_for, check_samples, tiny
from stock_runs import (
    LARGE_JOB_S,
    NOTING,
    Steps,
    check_like_stock,
    like_stock_and_back,
    losses_of,
    stock_steps,
)
from test_distributed_optimizer import FEWER, UNLIKE
from test_expert_parallelism import SHARED as EXPERTS
from test_expert_parallelism import WORKER, degrees, there_and_back
from test_plan_failures import are_heterogeneous
from torch.distributed import checkpoint as checkpoints
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_resihp.report.run.summary import compare

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("emerging_optimizers") is None,
        reason="emerging-optimizers is not installed: Megatron takes Muon from it",
    ),
]

PROVIDED = Path(__file__).with_name("provided_gpt.py")
DEALT: dict[str, Any] = {
    "optimizer": "dist_muon", "bf16": True, "muon_momentum": 0.8, "muon_nesterov": True,
    "muon_fp32_matmul_prec": "high", "weight_decay": 0.1, "lr": "1e-2", "min_lr": "1e-3",
    "no_use_layer_wise_param_layout": True,
}  # fmt: skip
"""Whole parameters are dealt out, matrices and others."""
LAID_OUT: dict[str, Any] = DEALT | {
    "optimizer": "muon", "use_distributed_optimizer": True, "no_use_layer_wise_param_layout": None,
}  # fmt: skip
"""Matrices are laid out so that no part of a buffer cuts one, and Megatron's distributed optimizer has the rest."""
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}
PIPELINE: dict[str, Any] = {
    "pipeline_model_parallel_size": 2, "swiglu": True, "overlap_grad_reduce": True, "ddp_bucket_size": 3000,
}  # fmt: skip
SAVED = 6
LATER: dict[str, Any] = {"train_iters": 10}

LONG: Final = Tolerance(2e-3, 3e-2)
"""Of more steps than six, and of experts. Seen are 1e-3 and 1.3e-2, which grow from step to step. Two runs of stock
Megatron that sum in another order come apart likewise, by 4e-4."""

Stock = Callable[..., Steps]


def script_of(layout: dict[str, Any]) -> dict[str, Any]:
    return {"script": PROVIDED} if layout["optimizer"] == "muon" else {}


@pytest.fixture(scope="module")
def stock(jobs: Jobs) -> Stock:
    """What stock Megatron trains; each layout is run once."""
    known: dict[str, Steps] = {}

    def steps(layout: dict[str, Any]) -> Steps:
        key = repr(sorted(layout.items()))
        if key not in known:
            known[key] = stock_steps(jobs, 4, **{"script": NOTING} | script_of(layout), **layout)
        return known[key]

    return steps


def survive(
    jobs: Jobs, stock: Stock, *injections: str, layout: dict[str, Any], tolerance: Tolerance = BF16, **extra: Any
) -> Job:
    arguments = tiny(**layout, **extra, **({"resihp_inject": injections} if injections else {}))
    job = jobs.start(arguments, workers=4, **script_of(layout)).wait(LARGE_JOB_S)
    assert job.code == 0, job.tails()
    check_like_stock(job, stock(layout), tolerance)
    check_samples(job)
    assert len(job.summary.deaths) == len(injections)
    return job


BOTH = pytest.mark.parametrize("layout", [DEALT, LAID_OUT], ids=["dealt", "laid out"])


@BOTH
@pytest.mark.parametrize("point", ["norm", "step", "gather"])
def test_a_death_of_one_of_four_replicas(jobs: Jobs, stock: Stock, layout: dict[str, Any], point: str) -> None:
    survive(jobs, stock, f"kill:1@3:{point}", layout=layout)


def test_momentum_shows_in_the_losses(stock: Stock) -> None:
    """The negative control."""
    found = compare(losses_of(stock(DEALT)), losses_of(stock(DEALT | {"muon_momentum": 0.5})))
    assert found is not None and found > LONG.loss > 5 * BF16.loss


@BOTH
def test_two_deaths_in_a_recovery(jobs: Jobs, stock: Stock, layout: dict[str, Any]) -> None:
    """Workers 3 and 1 are no neighbours in the ring of four."""
    survive(jobs, stock, "kill:3@3:step", "kill:1@1:recovery-migrate", layout=layout)


@BOTH
def test_a_copy_becomes_the_last_replica(jobs: Jobs, stock: Stock, layout: dict[str, Any]) -> None:
    """Worker 0 is a standby after the first death, which keeps a copy of what worker 2 owns."""
    job = survive(jobs, stock, "kill:3@2:gather", "kill:0@4:norm", layout=layout | TENSOR)
    [replica] = job.events("epoch_started")[-1]["plan"]["replicas"]
    assert replica["stages"] == [[2, 1]]


def test_a_worker_that_comes_back_owns_matrices_again(jobs: Jobs) -> None:
    job = like_stock_and_back(jobs, layout=DEALT | {"train_iters": 14}, tolerance=LONG)
    assert [len(event["plan"]["replicas"]) for event in job.events("epoch_started")] == [4, 3, 4]


@BOTH
def test_deaths_among_stages(jobs: Jobs, stock: Stock, layout: dict[str, Any]) -> None:
    survive(jobs, stock, "kill:1@2:step", "kill:2@4:backward", layout=layout | PIPELINE)


@BOTH
def test_experts_that_replicas_share(jobs: Jobs, stock: Stock, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Each replica gets all experts, they share them again, and one dies."""
    layout = layout | EXPERTS
    asked = there_and_back(tmp_path, WORKER)
    job = survive(jobs, stock, asked.pop("resihp_inject"), layout=layout, tolerance=LONG, **asked)
    assert degrees(job) == [(2, 4), (1, 4), (2, 4), (1, 3)]


@BOTH
def test_the_state_after_a_death_is_bit_for_bit_the_one_without(
    jobs: Jobs, stock: Stock, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """The victim dies with the last step. Stock Megatron goes on from what is saved, with as many replicas or fewer."""
    layout = layout | LATER
    saving = layout | {"save_interval": SAVED, "exit_interval": SAVED, "dist_ckpt_optim_fully_reshardable": True}
    whole, mended = tmp_path / "whole", tmp_path / "mended"
    for path, inject in ((whole, None), (mended, f"kill:1@{SAVED}:step")):
        job = jobs.run(tiny(**saving, save=path, resihp_inject=inject), workers=4, **script_of(layout))
        assert job.code == 0, job.tails()
        assert len(job.events("epoch_started")[-1]["plan"]["replicas"]) == (4 if inject is None else 3)
    before, after = (optimizer_tensors(path / f"iter_{SAVED:07d}") for path in (whole, mended))
    assert any("momentum_buffer" in key for key in before) and before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    for workers in (4, 2):
        check_that_stock_goes_on(jobs, losses_of(stock(layout)), layout | {"load": mended}, workers)


def check_that_stock_goes_on(jobs: Jobs, losses: dict[int, float], layout: dict[str, Any], workers: int) -> None:
    script = {"script": NOTING} | script_of(layout)
    found = losses_of(stock_steps(jobs, workers, **script, **layout))
    assert found == pytest.approx({n: loss for n, loss in losses.items() if n > SAVED}, rel=BF16.loss)


def optimizer_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Those of the optimizer's state, put together."""
    reader = checkpoints.FileSystemReader(checkpoint)
    tensors: dict[str, Any] = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in reader.read_metadata().state_dict_metadata.items()
        if "optimizer." in key and isinstance(each, TensorStorageMetadata)
    }
    checkpoints.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@BOTH
def test_unlike_replicas_and_back(jobs: Jobs, stock: Stock, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Parts are put together on the way there, and shared out on the way back, where a worker dies."""
    plans = ask_for(tmp_path, UNLIKE, FEWER)
    job = survive(jobs, stock, "kill:1@7:step", layout=layout | LATER, resihp_plan=plans)
    assert are_heterogeneous(job) == [False, True, False, False]


@BOTH
def test_stock_megatron_loads_what_unlike_replicas_save(jobs: Jobs, tmp_path: Path, layout: dict[str, Any]) -> None:
    """It goes on from the middle as the job does that saved."""
    layout = layout | LATER
    saving = layout | {"save": tmp_path / "saved", "save_interval": SAVED}
    asked = {"resihp_plan": ask_at(tmp_path, (UNLIKE, 2))}
    job = jobs.run(tiny(**saving, **asked), workers=4, **script_of(layout))
    assert job.code == 0 and are_heterogeneous(job) == [False, True], job.tails()
    loading = layout | {"load": tmp_path / "saved", "ckpt_step": SAVED}
    check_that_stock_goes_on(jobs, job.summary.loss, loading, workers=4)
