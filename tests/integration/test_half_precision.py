# SPDX-License-Identifier: Apache-2.0
"""Training in half precision: on an overflow all skip the step alike, and whatever happens the scale of losses is what
it would have been."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import BF16, EXPERTS, PRETRAIN, Job, Jobs, Tolerance, ask_for, check_training, tiny
from nursery import MOCK_DATA_SIZE
from test_pipeline_order import WITHOUT_PLUGIN
from test_plans import FOUR, PER_TOKEN, UNIFORM_LAYOUT, migrating, own_plan

from megatron_resihp.plan import ParallelPlan
from megatron_resihp.report.run.summary import compare

NIGHTLY = pytest.mark.nightly
HALF: dict[str, Any] = {
    "fp16": True, "accumulate_allreduce_grads_in_fp32": True, "num_layers": 4, "global_batch_size": 8,
    "initial_loss_scale": 2**21, "hysteresis": 1, "loss_scale_window": 2, "train_iters": 9,
}  # fmt: skip
"""The first steps are skipped, and some later ones: the scale grows again after every second step that is taken."""
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
SHARED: dict[str, Any] = {"use_distributed_optimizer": True}
SUMMED: dict[str, Any] = PER_TOKEN | {"initial_loss_scale": 2**14}
"""Losses are sums over the 32 tokens of a sample, and scaled so."""
BALANCED: dict[str, Any] = EXPERTS | {"sequence_parallel": True}
NARROW: dict[str, Any] = HALF | {"accumulate_allreduce_grads_in_fp32": None}
"""Gradients are summed in half precision, too, and what overflows is a sum."""
UNSCALED: dict[str, Any] = {"initial_loss_scale": 2**10, "loss_scale_window": 1000}
"""Nothing overflows."""
NARROW_SUMS = Tolerance(2e-5, 1e-2)
"""Seen are 3e-6 and 8e-4; two undisturbed jobs of four and two replicas differ by 1.3e-6."""
ITERATION = re.compile(r"iteration +\d+/.*?number of nan iterations: +\d+ \|")


def survive(jobs: Jobs, *injections: str, layout: dict[str, Any], plans: Sequence[str] = (), workers: int = 4) -> Job:
    """Run a job through fault injections or plans and compare it with the undisturbed one."""
    model = HALF | layout
    reference = jobs.reference(tiny(**model), workers=workers)
    job = jobs.run(tiny(**model, resihp_inject=injections or None, resihp_plan=plans or None), workers=workers)
    check_training(job, reference, BF16)
    assert len(job.summary.deaths) == len(injections)
    skipped = reference.summary.skipped_iterations
    assert 1 in skipped and len(skipped) > 1 and skipped[-1] > 3, "some of the first steps, and a later one"
    assert job.summary.skipped_iterations == skipped
    found, expected = scales(job), scales(reference)
    # Who reports an iteration may die with it.
    assert found.items() <= expected.items() and len(found) >= len(expected) - len(injections)
    assert list(found)[-1] == HALF["train_iters"]
    return job


def scales(job: Job) -> dict[int, float]:
    """What losses were multiplied by in each iteration."""
    return {event["iteration"]: event["loss_scale"] for event in job.events("iteration")}


@NIGHTLY
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (UNIFORM_LAYOUT, ["unlike replicas"]),
        (UNIFORM_LAYOUT, ["V shape, W apart", "a standby keeps its shard", "unlike replicas"]),
        (UNIFORM_LAYOUT | SUMMED, ["unlike replicas", "zero bubble"]),
        (UNIFORM_LAYOUT | BALANCED, ["TP 2 and 1"]),
        (UNIFORM_LAYOUT | SHARED, ["unlike replicas"]),
    ],
    ids=["unlike replicas", "orders", "per token", "experts", "distributed optimizer"],
)
def test_any_plan_skips_the_same_steps(jobs: Jobs, tmp_path: Path, layout: dict[str, Any], names: list[str]) -> None:
    plans = [*(FOUR[name] for name in names), own_plan(4)]
    job = survive(jobs, layout=layout, plans=ask_for(tmp_path, *plans))
    assert len(job.events("epoch_started")) == 1 + len(plans), job.tails()


@NIGHTLY
def test_replicas_that_share_work_skip_the_same_steps(jobs: Jobs, tmp_path: Path) -> None:
    """The job begins with two replicas, so losses are multiplied by more than in a plan that has one."""
    plans = [migrating(), ParallelPlan(own_plan(4).replicas, dict.fromkeys(range(4, 8))), own_plan(8)]
    survive(jobs, layout=UNIFORM_LAYOUT, plans=ask_for(tmp_path, *plans), workers=8)


@pytest.mark.parametrize(
    ("injections", "layout"),
    [
        pytest.param(["kill:3@2:step", "kill:0@6:norm"], TENSOR, marks=NIGHTLY),
        pytest.param(["kill:1@2:norm", "kill:2@4:step"], TENSOR, marks=NIGHTLY),
        pytest.param(["kill:2@2:step"], PIPELINE, marks=NIGHTLY),
        pytest.param(["kill:1@1:norm"], PIPELINE, marks=NIGHTLY),
        pytest.param(["kill:1@2:between"], PIPELINE | SUMMED, marks=NIGHTLY),
        pytest.param(["kill:3@2:step", "kill:0@6:norm"], TENSOR | SHARED, marks=NIGHTLY),
        pytest.param(["kill:1@2:norm", "kill:3@5:gather"], SHARED, marks=NIGHTLY),
    ],
)
def test_a_death_beside_a_step_that_is_skipped(jobs: Jobs, injections: list[str], layout: dict[str, Any]) -> None:
    """It is skipped once by all, standbys too, and those who are fewer afterwards skip no others."""
    survive(jobs, *injections, layout=layout)


@NIGHTLY
@pytest.mark.parametrize(
    ("layout", "injections", "names"),
    [
        (TENSOR, ["kill:3@2:step", "kill:0@6:norm"], []),
        (UNIFORM_LAYOUT, [], ["unlike replicas", "TP 2 and 1"]),
        (SHARED, ["kill:1@3:gather"], []),
        (PIPELINE | SUMMED | {"initial_loss_scale": 2**4}, ["kill:1@4:backward"], []),
    ],
    ids=["tensor", "unlike replicas", "distributed optimizer", "per token"],
)
def test_sums_in_half_precision(
    jobs: Jobs, tmp_path: Path, layout: dict[str, Any], injections: list[str], names: list[str]
) -> None:
    model, plans = NARROW | UNSCALED | layout, [FOUR[name] for name in names]
    reference = jobs.reference(tiny(**model), workers=4)
    arguments = tiny(**model, resihp_inject=injections or None, resihp_plan=ask_for(tmp_path, *plans) or None)
    job = jobs.run(arguments, workers=4)
    check_training(job, reference, NARROW_SUMS)
    assert len(job.summary.deaths) == len(injections) and len(job.events("reconfiguration")) == len(plans)
    assert not job.summary.skipped_iterations and not reference.summary.skipped_iterations


@NIGHTLY
def test_near_the_edge_sums_overflow_as_with_another_number_of_replicas(jobs: Jobs) -> None:
    """Undisturbed jobs of four and two replicas don't skip quite the same steps; one that loses a replica skips others
    only where they differ."""
    four, two = (jobs.reference(tiny(**NARROW), workers=workers).summary for workers in (4, 2))
    job = jobs.run(tiny(**NARROW, resihp_inject=["kill:1@3:step"]), workers=4)
    assert job.code == 0, job.tails()
    open_to_both = set(four.skipped_iterations) ^ set(two.skipped_iterations)
    assert set(job.summary.skipped_iterations) ^ set(four.skipped_iterations) <= open_to_both
    first = min(open_to_both, default=NARROW["train_iters"])
    assert first > 4 and {1, 2, 3} <= set(job.summary.skipped_iterations)
    difference = compare({n: loss for n, loss in job.summary.loss.items() if n <= first}, four.loss)
    assert difference is not None and difference <= NARROW_SUMS.loss


@NIGHTLY
def test_a_scale_that_never_moves(jobs: Jobs) -> None:
    """With Megatron's own checks of gradients off an overflow is skipped, again and again."""
    model = HALF | TENSOR | {"loss_scale": 2**14}
    reference = jobs.reference(tiny(**model), workers=4)
    job = jobs.run(tiny(**model, resihp_inject=["kill:3@3:norm"]), workers=4)
    check_training(job, reference, BF16)
    stuck = jobs.run(
        tiny(**model | {"loss_scale": 2**24, "no_check_for_nan_in_loss_and_grad": True, "train_iters": 3}), workers=4
    )
    assert stuck.code == 0 and stuck.summary.skipped_iterations == (1, 2, 3)


@NIGHTLY
@pytest.mark.parametrize("layout", [TENSOR, PIPELINE, SHARED, PIPELINE | SUMMED, TENSOR | BALANCED])
def test_without_the_plugin_megatron_trains_the_same(jobs: Jobs, tmp_path: Path, layout: dict[str, Any]) -> None:
    """In all printed digits where no gradient is clipped. The norm's squares are summed in another order, and what
    clips by it differs in the last bit, which half precision makes more of."""
    model = HALF | {"clip_grad": 1e4} | layout
    expected, found = _without_and_with_the_plugin(jobs, tmp_path, model)
    assert len(expected) == HALF["train_iters"] and found == expected


@NIGHTLY
def test_without_the_plugin_megatron_clips_the_same(jobs: Jobs, tmp_path: Path) -> None:
    """Adam makes little of a factor that is the same in all steps, and much of one that follows the norm."""
    expected, found = _without_and_with_the_plugin(jobs, tmp_path, HALF | TENSOR | {"clip_grad": 1.0})
    assert len(_losses(expected)) > HALF["train_iters"] // 2
    assert _losses(found) == pytest.approx(_losses(expected), rel=1e-5)
    unclipped = told(jobs.reference(tiny(**HALF | TENSOR | {"clip_grad": 1e4}), workers=4).log(3))
    assert _losses(unclipped) != pytest.approx(_losses(expected), rel=5e-4)


def _without_and_with_the_plugin(
    jobs: Jobs, tmp_path: Path, model: dict[str, Any]
) -> tuple[list[list[str]], list[list[str]]]:
    """What Megatron's log says of each iteration."""
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import runpy\n"
        "from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset\n"
        f"MockGPTLowLevelDataset.size = {MOCK_DATA_SIZE}\n"
        f"runpy.run_path({str(PRETRAIN)!r}, run_name='__main__')\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    finished = subprocess.run(
        [*launcher, "-m", "megatron_resihp.cpu", str(script), *tiny(**model | WITHOUT_PLUGIN)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return told(finished.stdout), told(jobs.reference(tiny(**model), workers=4).log(3))


def _losses(told_of: list[list[str]]) -> list[float]:
    """Of the steps that were not skipped."""
    return [float(part.partition(": ")[2]) for line in told_of for part in line if part.startswith("lm loss")]


def told(log: str) -> list[list[str]]:
    """What Megatron's log says of each iteration, but for times. Another process may have written on the same line,
    before it or after it."""
    lines = [line.split(" | ") for line in ITERATION.findall(log)]
    return [[" ".join(part.split()) for part in line if "elapsed time" not in part] for line in lines]
