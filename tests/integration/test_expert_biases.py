# SPDX-License-Identifier: Apache-2.0
"""Expert biases, which each step changes by where its tokens went: whatever dies, they end as stock Megatron's do, bit
for bit, and losses are stock Megatron's too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from jobs import BIASED, FP32, Job, Jobs, Tolerance, ask_for, check_training, tiny
from stock_runs import check_like_stock, losses_of, stock_steps
from test_plan_failures import are_heterogeneous
from test_plans import stages
from test_query_groups import plan

from megatron_resihp.integration import releases
from megatron_resihp.report.run.summary import compare

NIGHTLY = pytest.mark.nightly
MODEL: dict[str, Any] = BIASED | {
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "global_batch_size": 2, "train_iters": 11,
    "ckpt_format": "torch", "save_interval": 100,
}  # fmt: skip
"""Two members in each of two replicas, and two layers."""
SHARED: dict[str, Any] = {"use_distributed_optimizer": True}
RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
"""Megatron counts tokens where it computes a layer again, not before."""
BY_QUANTILES: dict[str, Any] = MODEL | {
    "moe_router_load_balancing_type": "quantile_balancing", "moe_aux_loss_coeff": 0,
    "moe_router_enable_expert_bias": None, "moe_router_bias_update_rate": None,
}  # fmt: skip
ROUTED: Final = Tolerance(1e-3, 1e-2)
"""In 16 bits stages of other degrees round scores otherwise, which leads a few tokens to other experts. Seen are 2e-4
and 1e-3, and biases that differ by the rate."""
RATE: float = BIASED["moe_router_bias_update_rate"]


def biases(path: Path, kind: str = "expert_bias") -> dict[str, torch.Tensor]:
    """Those in a checkpoint, by TP rank and layer."""
    found = {}
    for file in sorted(path.glob("iter_*/mp_rank_*/model_optim_rng.pt")):
        model = torch.load(file, weights_only=False)["model"]
        found |= {f"{file.parent.name} {key}": each for key, each in model.items() if key.endswith(kind)}
    return found


def check_biases(path: Path, expected: Path) -> None:
    """A checkpoint has the other one's biases, some of which have been pushed the same way several times."""
    ours, stocks = biases(path), biases(expected)
    assert ours.keys() == stocks.keys() and len(ours) == 4, "two layers for each TP rank"
    for name, bias in ours.items():
        assert torch.equal(bias, stocks[name]), name
        assert bias.dtype == torch.float32 and torch.count_nonzero(bias) > 1, name
    assert max(float(bias.abs().max()) for bias in ours.values()) > 2 * RATE


@pytest.mark.parametrize(
    ("model", "tolerance"),
    [
        pytest.param(model, tolerance, marks=NIGHTLY, id=name)
        for name, (model, tolerance) in {
            "plain": ({}, FP32),
            "parts of the optimizer": (SHARED, FP32),
            "recomputed": (RECOMPUTED, FP32),
            "bf16": ({"bf16": True, "moe_router_dtype": "fp32"}, ROUTED),
        }.items()
    ],
)
def test_a_death_and_other_degrees(jobs: Jobs, tmp_path: Path, model: dict[str, Any], tolerance: Tolerance) -> None:
    words = ask_for(tmp_path, plan(stages([2], [1, 0])), plan(stages([0, 1])))
    model, ours, stocks = MODEL | model, tmp_path / "ours", tmp_path / "stock"
    injection = "kill:3@1:backward"
    job = jobs.run(tiny(**model, save=ours, resihp_plan=words, resihp_inject=injection), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4), tolerance)
    assert are_heterogeneous(job) == [False, False, True, False]
    check_like_stock(job, stock_steps(jobs, 4, **model, save=stocks), tolerance)
    if tolerance is ROUTED:
        return
    check_biases(ours, stocks)
    # The control: without biases other experts get the tokens.
    unbiased = jobs.reference(tiny(**model | {"moe_router_bias_update_rate": 0}), workers=4)
    assert (compare(job.summary.loss, unbiased.summary.loss) or 0) > 10 * tolerance.loss


@NIGHTLY
@pytest.mark.parametrize(
    ("model", "injection"),
    [
        ({}, "kill:3@1:backward"),
        (SHARED | {"moe_router_quantile_balancing_ema": 0.3}, "kill:3@1:step"),
        (RECOMPUTED, "kill:3@1:norm"),
    ],
    ids=["plain", "parts of the optimizer, with a memory", "recomputed"],
)
def test_biases_that_follow_quantiles(jobs: Jobs, tmp_path: Path, model: dict[str, Any], injection: str) -> None:
    """Their sums are rounded by their order, so biases and losses are only nearly stock Megatron's."""
    if releases.current().quantile_balancing == {}:
        pytest.skip("this Megatron has no quantile balancing")
    words = ask_for(tmp_path, plan(stages([2], [1, 0])), plan(stages([0, 1])))
    model, ours, stocks = BY_QUANTILES | model, tmp_path / "ours", tmp_path / "stock"
    job = jobs.run(tiny(**model, save=ours, resihp_plan=words, resihp_inject=injection), workers=4)
    assert are_heterogeneous(job) == [False, False, True, False]
    check_like_stock(job, stock_steps(jobs, 4, **model, save=stocks))
    found, expected = (biases(path, "qb_beta") for path in (ours, stocks))
    assert found.keys() == expected.keys() and len(found) == 4, "two layers for each TP rank"
    for name, bias in found.items():
        assert bias.dtype == torch.float32 and torch.allclose(bias, expected[name], rtol=1e-4, atol=1e-6), name
        assert float(bias.abs().max()) > 1e-2, "the scores' quantiles differ"
    # The control: without biases other experts get the tokens.
    unbiased = stock_steps(jobs, 4, **model | {"moe_router_load_balancing_type": "none"})
    assert (compare(job.summary.loss, losses_of(unbiased)) or 0) > 10 * FP32.loss


def survive(jobs: Jobs, path: Path, *injections: str, **extra: Any) -> Job:
    """Deaths leave the biases of the undisturbed job. `path`: for a checkpoint."""
    undisturbed = jobs.directory / f"biased{len(extra)}"
    reference = jobs.reference(tiny(**MODEL | extra, save=undisturbed), workers=4)
    job = jobs.run(tiny(**MODEL | extra, save=path / "saved", resihp_inject=injections), workers=4)
    check_training(job, reference)
    check_biases(path / "saved", undisturbed)
    return job


@NIGHTLY
@pytest.mark.parametrize("point", ["norm", "step"])
def test_an_iteration_that_is_repeated_or_stepped_later(jobs: Jobs, tmp_path: Path, point: str) -> None:
    """Before a step is agreed on, its counts come to nothing. Afterwards survivors take it with those they have."""
    job = survive(jobs, tmp_path, f"kill:3@3:{point}")
    assert len(job.summary.deaths) == 1


@NIGHTLY
@pytest.mark.parametrize("extra", [{}, SHARED], ids=["plain", "parts of the optimizer"])
def test_a_standby_goes_on_with_them(jobs: Jobs, tmp_path: Path, extra: dict[str, Any]) -> None:
    """Worker 2 has no work after the first death, and is the only one with its shard after the second."""
    job = survive(jobs, tmp_path, "kill:3@2:step", "kill:0@4:norm", **extra)
    [replica] = job.events("epoch_started")[-1]["plan"]["replicas"]
    assert replica["stages"] == [[2, 1]]
