# SPDX-License-Identifier: Apache-2.0
"""Experts that are dealt in unequal numbers: of four workers that share eight, three share them as 3, 3 and 2, and the
job trains what Megatron itself trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import BIASED, FP32, PRETRAIN, Job, Jobs, Tolerance, ask_at, check_samples, tiny
from stock_runs import NOTING, check_like_stock, losses_of, stock_losses, stock_steps
from test_checkpoints import FUSED, as_stock_says
from test_expert_biases import ROUTED
from test_expert_parallelism import (
    GATHERED,
    LARGE_JOB_S,
    OPTIMIZER,
    PIPELINE,
    SHARED,
    SWIGLU,
    TENSOR,
    check_gone_on_from,
)

from megatron_resihp.control import exit_codes
from megatron_resihp.plan import ParallelPlan, Replica

pytestmark = pytest.mark.nightly

WORKERS, EXPERTS = 4, 8
EIGHT_BY_ALL: dict[str, Any] = {"num_experts": EXPERTS, "expert_model_parallel_size": WORKERS}
SHARED_BY_ALL: dict[str, Any] = SHARED | EIGHT_BY_ALL
SMALL_DEVICES = Path(__file__).with_name("small_devices_gpt.py")
GROUPED_SCRIPT = Path(__file__).with_name("grouped_gpt.py")
SMALL_GROUPED = Path(__file__).with_name("small_grouped_gpt.py")
GROUPED: dict[str, Any] = {"moe_grouped_gemm": True}
"""With those scripts, each of a layer's two products is a module that has all of a worker's experts."""


WORKER = tuple(((worker,),) for worker in range(2 * WORKERS))
MEMBERS = tuple(((2 * replica, 2 * replica + 1),) for replica in range(WORKERS))
STAGES = tuple(((replica,), (replica + WORKERS,)) for replica in range(WORKERS))


def shared_by(degree: int, replicas: Any = WORKER, groups: int = 1) -> ParallelPlan:
    """The first of these replicas, given by their stages, share experts in groups, and have all micro-batches between
    them."""
    count = degree * groups
    dealt = (tuple(range(index, SHARED["global_batch_size"], count)) for index in range(count))
    rows = tuple(Replica(stages, numbers) for stages, numbers in zip(replicas[:count], dealt, strict=True))
    return ParallelPlan(rows, expert_parallel=degree, uneven_experts=EXPERTS if EXPERTS % degree else 0)


def degrees(job: Job) -> list[tuple[int, int]]:
    """Of each epoch: how many replicas share experts, and how many experts are dealt in unequal numbers."""
    plans = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    return [(plan.expert_parallel, plan.uneven_experts) for plan in plans]


@pytest.mark.parametrize(
    ("replicas", "layout", "tolerance"),
    [
        (WORKER[:WORKERS], {}, FP32),
        (WORKER[:WORKERS], GATHERED, FP32),
        (WORKER[:WORKERS], OPTIMIZER, FP32),
        (MEMBERS, TENSOR | OPTIMIZER, FP32),
        (STAGES, PIPELINE, FP32),
        (
            WORKER[:WORKERS],
            BIASED | {"use_distributed_optimizer": True, "bf16": True, "moe_router_dtype": "fp32"},
            ROUTED,
        ),
    ],
    ids=["all to all", "gathered", "optimizer", "optimizer, tensor", "stages", "biased, bf16"],
)
def test_a_change_there_and_back(
    jobs: Jobs, tmp_path: Path, replicas: Any, layout: dict[str, Any], tolerance: Tolerance
) -> None:
    layout, workers = SHARED | layout | EIGHT_BY_ALL, len(replicas) * sum(map(len, replicas[0]))
    stock = stock_steps(jobs, workers, **layout)
    asked = ask_at(tmp_path, (shared_by(3, replicas), 2), (shared_by(4, replicas), 6))
    job = jobs.start(tiny(**layout, resihp_plan=asked), workers=workers).wait(LARGE_JOB_S)
    check_like_stock(job, stock, tolerance)
    check_samples(job)
    assert degrees(job) == [(4, 0), (3, 8), (4, 0)]


@pytest.mark.parametrize(
    ("layout", "stock_script", "script"),
    [({}, NOTING, SMALL_DEVICES), (GROUPED, GROUPED_SCRIPT, SMALL_GROUPED)],
    ids=["one after another", "grouped"],
)
def test_deaths_where_memory_holds_no_equal_numbers(
    jobs: Jobs, layout: dict[str, Any], stock_script: Path, script: Path
) -> None:
    """Three survivors don't have room for all experts each, and are faster than two that share them. Then one of the
    three dies, with experts that nobody else has; copies of its part of the optimizer have them."""
    layout = SHARED_BY_ALL | OPTIMIZER | layout
    stock = stock_steps(jobs, WORKERS, stock_script, **layout)
    deaths = ["kill:3@3:backward", "kill:1@6:step"]
    job = jobs.run(tiny(**layout, resihp_inject=deaths), workers=WORKERS, script=script)
    check_like_stock(job, stock)
    check_samples(job)
    assert degrees(job) == [(4, 0), (3, 8), (2, 0)]


def test_two_groups_and_a_death_in_one(jobs: Jobs, tmp_path: Path) -> None:
    """Each group of three has all experts, so what one worker has lost another has."""
    layout = SHARED_BY_ALL | {"train_iters": 7}
    stock = stock_steps(jobs, 2 * WORKERS, **layout)
    asked = ask_at(tmp_path, (shared_by(3, groups=2), 2))
    job = jobs.run(tiny(**layout, resihp_plan=asked, resihp_inject="kill:1@4:backward"), workers=2 * WORKERS)
    check_like_stock(job, stock)
    check_samples(job)
    assert degrees(job)[:2] == [(4, 0), (3, 8)] and len(degrees(job)) == 3


@pytest.mark.parametrize("layout", [SWIGLU, OPTIMIZER], ids=["gated", "optimizer"])
def test_a_checkpoint(jobs: Jobs, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Stock Megatron goes on from it under the job's own degree."""
    layout = SHARED_BY_ALL | layout
    stock = losses_of(stock_steps(jobs, WORKERS, **layout))
    path = tmp_path / "saved"
    saving = {"save": path, "save_interval": 5, "exit_interval": 5}
    job = jobs.run(tiny(**layout | saving, resihp_plan=ask_at(tmp_path, (shared_by(3), 2))), workers=WORKERS)
    assert job.code == 0 and degrees(job) == [(4, 0), (3, 8)], job.tails()
    expected = {number: stock[number] for number in range(6, 10)}
    script = FUSED if "use_distributed_optimizer" in layout else PRETRAIN
    losses = stock_losses(jobs, script, WORKERS, **layout | {"load": path, "ckpt_format": "torch_dist"})
    assert losses == pytest.approx(as_stock_says(expected), rel=FP32.loss)


@pytest.mark.parametrize(
    ("replicas", "layout"), [(WORKER, SWIGLU), (MEMBERS, TENSOR | OPTIMIZER)], ids=["gated", "optimizer, tensor"]
)
def test_a_checkpoint_of_grouped_products(jobs: Jobs, tmp_path: Path, replicas: Any, layout: dict[str, Any]) -> None:
    """Stock Megatron goes on from it under the job's own degree, and under a smaller one with experts one after
    another."""
    layout, workers, path = SHARED_BY_ALL | GROUPED | layout, WORKERS * len(replicas[0][0]), tmp_path / "saved"
    stock = losses_of(stock_steps(jobs, workers, GROUPED_SCRIPT, **layout))
    saving = {"save": path, "save_interval": 5, "exit_interval": 5}
    asked = ask_at(tmp_path, (shared_by(3, replicas), 2))
    job = jobs.start(tiny(**layout | saving, resihp_plan=asked), workers=workers, script=GROUPED_SCRIPT)
    assert job.wait(LARGE_JOB_S).code == 0 and degrees(job) == [(4, 0), (3, 8)], job.tails()
    loading = layout | {"load": path, "ckpt_format": "torch_dist"}
    for other in ({}, {"moe_grouped_gemm": False, "expert_model_parallel_size": 2}):
        losses = losses_of(stock_steps(jobs, workers, GROUPED_SCRIPT, **loading | other))
        assert losses == pytest.approx({number: stock[number] for number in range(6, 10)}, rel=FP32.loss)


@pytest.mark.parametrize(
    ("layout", "scripts"),
    [({}, (FUSED, NOTING)), (GROUPED, (GROUPED_SCRIPT, GROUPED_SCRIPT))],
    ids=["one after another", "grouped"],
)
def test_what_survivors_saved_is_gone_on_from(
    jobs: Jobs, tmp_path: Path, layout: dict[str, Any], scripts: tuple[Path, Path]
) -> None:
    """They are too few for the user, and save what they have: what one of a group has lost, one of the other has."""
    layout, workers = SHARED_BY_ALL | OPTIMIZER | layout, 2 * WORKERS
    asked = ask_at(tmp_path, (shared_by(3, groups=2), 2))
    arguments = tiny(**layout, resihp_plan=asked, resihp_inject=["kill:1@4"])
    lost = jobs.run(arguments, workers=workers, min_workers=workers, script=scripts[0])
    assert lost.code == exit_codes.NO_PLAN, lost.tails()
    assert degrees(lost) == [(4, 0), (3, 8)]
    check_gone_on_from(lost, jobs, workers, layout, scripts=scripts)
