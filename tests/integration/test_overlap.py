# SPDX-License-Identifier: Apache-2.0
"""Parameters that are gathered in the next forward pass: a death finds some of them there and others stale, and the job
trains what Megatron itself trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import (
    BF16,
    FP32,
    Job,
    Jobs,
    Tolerance,
    ask_at,
    check_training,
    tiny,
)
from stock_runs import check_like_stock, losses_of, stock_steps
from test_distributed_optimizer import CROSSED, FEWER, FOUR, UNLIKE, UNLIKE_DEGREES
from test_recovery_points import evaluations

from megatron_resihp.report.run.summary import compare

NIGHTLY = pytest.mark.nightly
GATHERED: dict[str, Any] = {
    "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True,
    "ddp_bucket_size": 3000, "train_iters": 9,
}  # fmt: skip
"""Four replicas, and several buckets in each layer."""
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
WATCHED: dict[str, Any] = {
    "eval_interval": 2, "eval_iters": 1, "check_weight_hash_across_dp_replicas_interval": 3, "test_mode": True,
    "qk_layernorm": True,
}  # fmt: skip
"""Megatron looks at all parameters between iterations, at some of them in each layer, and fails if replicas differ."""
OTHERS: dict[str, Any] = {"decoupled_lr": "3e-3", "decoupled_min_lr": "3e-4", "ddp_average_in_collective": True}
"""What changes how gradients are averaged, and what embeddings learn."""
INSTANCES: dict[str, Any] = {"num_distributed_optimizer_instances": 2}
"""Two replicas have all of the optimizer's state, and the other two as well."""
AS_PRINTED = Tolerance(1e-6, 1e-6)
"""Of 32 bits, as Megatron sums losses; seen are 6e-8."""


def survive(
    jobs: Jobs, *injections: str, layout: dict[str, Any], plans: Sequence[str] = (), tolerance: Tolerance = FP32,
    **extra: Any,
) -> Job:  # fmt: skip
    model = GATHERED | layout
    reference = jobs.reference(tiny(**model), workers=4)
    job = jobs.run(
        tiny(**model, **extra, resihp_inject=injections or None, resihp_plan=plans or None), workers=4
    )  # fmt: skip
    check_training(job, reference, tolerance)
    assert len(job.summary.deaths) == len(injections) and len(job.events("reconfiguration")) == len(plans)
    if "eval_interval" in layout:
        assert evaluations(job) == pytest.approx(evaluations(reference), rel=tolerance.loss) and evaluations(job)
    return job


def test_a_death_among_gathered_and_stale_parameters(jobs: Jobs, tmp_path: Path) -> None:
    """After a plan without a distributed optimizer, and the way back, whose objects get hooks of their own."""
    plans = ask_at(tmp_path, (UNLIKE, 2), (FOUR, 6))
    job = survive(jobs, "kill:1@11:gather", layout=WATCHED | OTHERS | {"train_iters": 13}, plans=plans)
    [told] = [line for worker in range(4) for line in job.log(worker).splitlines() if "can't be followed" in line]
    assert "--overlap-param-gather can't be followed" in told and "--overlap-grad-reduce" not in told
    assert job.log(0).count(">>> Weight hashes match") >= 3


@NIGHTLY
@pytest.mark.parametrize("point", ["forward", "backward", "grad-sync", "norm", "step", "gather", "between"])
def test_a_death_at_any_point(jobs: Jobs, point: str) -> None:
    survive(jobs, f"kill:1@3:{point}", "kill:2@6:gather", layout={})


@NIGHTLY
@pytest.mark.parametrize("victims", [(1, 2), (3, 0)])
@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        (TENSOR | WATCHED, FP32),
        (TENSOR | {"bf16": True, "sequence_parallel": True}, BF16),
        (PIPELINE | {"bf16": True}, BF16),
        (PIPELINE | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, FP32),
    ],
    ids=["tensor", "tensor, bf16", "pipeline, bf16", "recomputed"],
)
def test_deaths_in_other_layouts(
    jobs: Jobs, layout: dict[str, Any], tolerance: Tolerance, victims: tuple[int, int]
) -> None:
    """The second one leaves one replica of what standbys have kept."""
    first, second = victims
    survive(jobs, f"kill:{first}@3:gather", f"kill:{second}@6:forward", layout=layout, tolerance=tolerance)


@NIGHTLY
@pytest.mark.parametrize("point", ["evaluate", "save"])
def test_a_death_while_all_parameters_are_wanted(jobs: Jobs, tmp_path: Path, point: str) -> None:
    """Also after the last iteration, where train() is not entered again, and nothing turns the hooks of new objects on
    or off."""
    saving = {"save": tmp_path / "saved", "save_interval": 2}
    survive(jobs, f"kill:1@4:{point}", f"kill:3@10:{point}", layout=WATCHED | {"train_iters": 9}, **saving)


@NIGHTLY
@pytest.mark.parametrize("overlap", [True, False])
def test_several_instances_of_the_optimizer(jobs: Jobs, tmp_path: Path, overlap: bool) -> None:
    """Three replicas are one instance, and so are the two that are kept by choice."""
    pytest.importorskip("einops", reason="einops is not installed: Megatron makes the groups of instances with it")
    layout = INSTANCES | {"train_iters": 16, "overlap_param_gather": overlap, "overlap_grad_reduce": overlap}
    survive(jobs, "kill:1@3:gather", layout=layout)
    survive(jobs, "kill:1@13:gather", layout=layout, plans=ask_at(tmp_path, (FEWER, 2)))


@NIGHTLY
def test_megatron_itself_trains_the_same(jobs: Jobs, tmp_path: Path) -> None:
    plans = ask_at(tmp_path, (UNLIKE_DEGREES, 2), (CROSSED, 6))
    layout = GATHERED | TENSOR | {"train_iters": 14}
    stock, other = (stock_steps(jobs, 4, **layout | rate) for rate in ({}, {"lr": 1e-9, "min_lr": 0}))
    check_like_stock(jobs.run(tiny(**layout), workers=4), stock, AS_PRINTED)
    job = jobs.run(tiny(**layout, resihp_plan=plans, resihp_inject="kill:3@11:gather"), workers=4)
    check_like_stock(job, stock)
    assert len(job.events("reconfiguration")) == 2 and len(job.summary.deaths) == 1
    difference = compare(losses_of(stock), losses_of(other))
    assert difference is not None and difference > 100 * FP32.loss, "training shows in these losses"
