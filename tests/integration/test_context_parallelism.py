# SPDX-License-Identifier: Apache-2.0
"""Sequences that several workers share: the job trains what Megatron itself trains, under the job's own degree of
context parallelism and under smaller ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import BF16, FP32, PRETRAIN, Job, Jobs, Tolerance, ask_at, check_samples, tiny
from stock_runs import (
    check_like_stock,
    check_that_training_shows,
    like_stock,
    like_stock_and_back,
    losses_of,
    stock_losses,
    stock_steps,
)
from test_checkpoints import FUSED, as_stock_says
from test_emergency import emergency
from test_recovery_points import evaluations

from megatron_resihp.control import exit_codes
from megatron_resihp.control.worker.saved_state import flags, newest_state
from megatron_resihp.plan import Coordinate, ParallelPlan, Replica
from megatron_resihp.report.run.summary import compare

pytestmark = pytest.mark.nightly

WORKERS = 4
SHARED: dict[str, Any] = {"context_parallel_size": 2, "train_iters": 9, "global_batch_size": 6}
"""Two pairs of workers: each pair shares its sequences."""
GROUPED: dict[str, Any] = {"group_query_attention": True, "num_query_groups": 2}
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True, **GROUPED}
PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
OPTIMIZER: dict[str, Any] = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
ALONE = ParallelPlan(tuple(Replica(((worker,),), tuple(range(worker, 6, WORKERS))) for worker in range(WORKERS)))
PAIRS = ParallelPlan(
    tuple(Replica(((worker,),), tuple(range(worker // 2, 6, 2))) for worker in range(WORKERS)), context_parallel=2
)


UNLIKE = ParallelPlan(
    tuple(Replica(((worker,),), hand) for worker, hand in enumerate([(0, 1, 2), (0, 1, 2), (3, 4), (5,)])),
    context_parallel=2, context_groups=(2, 1, 1),
)  # fmt: skip
"""A pair shares its sequences, and two workers have theirs alone."""


def degrees(job: Job) -> list[tuple[int, int]]:
    """Of each epoch: how many replicas share each sequence, and how many there are."""
    plans = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    return [(plan.context_parallel, len(plan.replicas)) for plan in plans]


def groups(job: Job) -> list[tuple[int, ...]]:
    """Of each epoch: how many replicas share each sequence, group by group."""
    plans = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    return [tuple(map(len, plan.sharing_sequences)) for plan in plans]


def test_training_shows_in_the_losses(jobs: Jobs) -> None:
    check_that_training_shows(jobs, WORKERS, SHARED)


def test_a_shared_sequence_is_trained_as_a_whole_one(jobs: Jobs) -> None:
    """The stand-in's attention: stock Megatron with and without context parallelism."""
    layout = SHARED | GROUPED | {"global_batch_size": 4}
    whole, shared = (stock_steps(jobs, WORKERS, **layout | {"context_parallel_size": n}) for n in (1, 2))
    for number in whole:
        assert shared[number] == pytest.approx(whole[number], rel=FP32.loss)


def test_nothing_happens(jobs: Jobs) -> None:
    job = like_stock(jobs, layout=SHARED)
    assert degrees(job) == [(2, 4)]


def test_a_death_and_the_return_of_the_worker(jobs: Jobs) -> None:
    """Three workers train sequences of their own; with the fourth they share them again."""
    job = like_stock_and_back(jobs, layout=SHARED | {"train_iters": 14})
    assert degrees(job) == [(2, 4), (1, 3), (2, 4)]


@pytest.mark.parametrize("point", ["context", "context-backward"])
def test_a_death_where_those_that_share_a_sequence_meet(jobs: Jobs, point: str) -> None:
    job = like_stock(jobs, f"kill:1@3:{point}", layout=SHARED)
    assert degrees(job) == [(2, 4), (1, 3)]


@pytest.mark.parametrize("point", ["forward", "backward", "grad-sync", "norm", "step", "between"])
def test_a_death_at_any_point(jobs: Jobs, point: str) -> None:
    """The second one leaves a pair, which shares sequences again."""
    job = like_stock(jobs, f"kill:1@3:{point}", f"kill:2@6:{point}", layout=SHARED)
    assert degrees(job) == [(2, 4), (1, 3), (2, 2)]


@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        (TENSOR, FP32),
        (PIPELINE, FP32),
        (PIPELINE | {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}, FP32),
        (OPTIMIZER, FP32),
        (OPTIMIZER | TENSOR, FP32),
        ({"bf16": True}, BF16),
        (OPTIMIZER | {"bf16": True}, BF16),
        ({"calculate_per_token_loss": True, "eod_mask_loss": True}, FP32),
        ({"position_embedding_type": "learned_absolute"}, FP32),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, FP32),
    ],
    ids=[
        "tensor", "pipeline", "interleaved", "optimizer", "optimizer, tensor", "bf16", "optimizer, bf16", "per token",
        "learned positions", "recomputed",
    ],
)  # fmt: skip
def test_a_death_in_other_layouts(jobs: Jobs, layout: dict[str, Any], tolerance: Tolerance) -> None:
    job = like_stock(jobs, "kill:1@4:backward", layout=SHARED | layout, tolerance=tolerance)
    assert degrees(job)[0][0] == 2 and len(degrees(job)) == 2


def test_positions_that_begin_anew_with_each_document(jobs: Jobs) -> None:
    anew = SHARED | {"position_embedding_type": "learned_absolute", "reset_position_ids": True}
    job = like_stock(jobs, "kill:1@4:backward", layout=anew)
    # The control: they are part of what is trained.
    through = stock_steps(jobs, WORKERS, **anew | {"reset_position_ids": False})
    assert (compare(job.summary.loss, losses_of(through)) or 0) > 1e-4


def test_four_share_and_then_two(jobs: Jobs) -> None:
    job = like_stock(jobs, "kill:2@4", layout=SHARED | {"context_parallel_size": 4, "global_batch_size": 1})
    assert degrees(job) == [(4, 4), (2, 2)]


def test_groups_of_groups(jobs: Jobs) -> None:
    """Four share each sequence, in two pairs of which each member exchanges heads with the other. They stay four."""
    layout = SHARED | {
        "context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2], "cp_comm_type": "a2a+p2p",
        "global_batch_size": 4,
    }  # fmt: skip
    stock = stock_steps(jobs, 2 * WORKERS, **layout)
    job = jobs.run(tiny(**layout, resihp_inject="kill:2@4"), workers=2 * WORKERS)
    check_like_stock(job, stock)
    check_samples(job)
    assert degrees(job) == [(4, 8), (4, 4)]


@pytest.mark.parametrize("layout", [{}, OPTIMIZER], ids=["plain", "optimizer"])
def test_a_change_by_choice_there_and_back(jobs: Jobs, tmp_path: Path, layout: dict[str, Any]) -> None:
    plans = ask_at(tmp_path, (ALONE, 2), (PAIRS, 6))
    job = like_stock(jobs, layout=SHARED | layout, resihp_plan=plans)
    assert degrees(job) == [(2, 4), (1, 4), (2, 4)]


@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        ({}, FP32),
        (TENSOR, FP32),
        (PIPELINE, FP32),
        (PIPELINE | {"use_tp_pp_dp_mapping": True, "expert_tensor_parallel_size": 2}, FP32),
        (OPTIMIZER, FP32),
        ({"bf16": True}, BF16),
        ({"calculate_per_token_loss": True, "eod_mask_loss": True}, FP32),
    ],
    ids=["plain", "tensor", "pipeline", "pipelines in a row", "optimizer", "bf16", "per token"],
)
def test_a_death_after_which_groups_differ(jobs: Jobs, layout: dict[str, Any], tolerance: Tolerance) -> None:
    """Of three replicas two share three sequences, and one has a fourth alone: that is faster than one each, of which
    one has two. With the fourth replica they share as before."""
    batch = SHARED | layout | {"global_batch_size": 4, "train_iters": 14}
    whole = layout.get("tensor_model_parallel_size", 1) * layout.get("pipeline_model_parallel_size", 1)
    job = like_stock_and_back(jobs, layout=batch, tolerance=tolerance, workers=WORKERS * whole)
    assert groups(job) == [(2, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize("layout", [{}, OPTIMIZER], ids=["plain", "optimizer"])
def test_groups_that_differ_by_choice_there_and_back(jobs: Jobs, tmp_path: Path, layout: dict[str, Any]) -> None:
    plans = ask_at(tmp_path, (UNLIKE, 2), (PAIRS, 6))
    job = like_stock(jobs, layout=SHARED | layout, resihp_plan=plans)
    assert groups(job) == [(2, 2), (2, 1, 1), (2, 2)]


@pytest.mark.parametrize("batch", [6, 4], ids=["one size", "unlike sizes"])
def test_evaluation(jobs: Jobs, batch: int) -> None:
    """Those that share sequences evaluate the same micro-batches."""
    layout = SHARED | {"eval_interval": 3, "eval_iters": 1, "global_batch_size": batch}
    reference = jobs.reference(tiny(**layout), workers=WORKERS)
    job = like_stock(jobs, "kill:1@4", layout=layout)
    assert evaluations(job) == pytest.approx(evaluations(reference), rel=FP32.loss) and evaluations(job)


@pytest.mark.parametrize(("batch", "sizes"), [(6, (1, 1, 1)), (4, (2, 1))], ids=["one size", "unlike sizes"])
@pytest.mark.parametrize("layout", [{}, OPTIMIZER], ids=["plain", "optimizer"])
def test_a_checkpoint_of_a_smaller_degree(
    jobs: Jobs, tmp_path: Path, layout: dict[str, Any], batch: int, sizes: tuple[int, ...]
) -> None:
    """Stock Megatron goes on from it under the job's own degree."""
    layout = layout | {"global_batch_size": batch}
    optimizer = "use_distributed_optimizer" in layout
    saved = SHARED | layout | ({"dist_ckpt_optim_fully_reshardable": True} if optimizer else {})
    stock = losses_of(stock_steps(jobs, WORKERS, **SHARED | layout))
    saving = {"save": tmp_path / "saved", "save_interval": 6, "exit_interval": 6}
    job = jobs.run(tiny(**saved | saving, resihp_inject="kill:3@3"), workers=WORKERS)
    assert job.code == 0 and groups(job) == [(2, 2), sizes], job.tails()
    # Megatron compares what workers say of the job.
    assert not any("common state dict" in job.log(worker) for worker in range(WORKERS))
    losses = stock_losses(jobs, FUSED if optimizer else PRETRAIN, WORKERS, **saved | {"load": tmp_path / "saved"})
    assert losses == pytest.approx(as_stock_says({number: stock[number] for number in (7, 8, 9)}), rel=FP32.loss)


@pytest.mark.parametrize("layout", [{}, TENSOR, OPTIMIZER], ids=["plain", "tensor", "optimizer"])
def test_what_survivors_saved_is_gone_on_from(jobs: Jobs, layout: dict[str, Any]) -> None:
    """They are too few for the user, and save what they have; the job goes on from that under its own degree."""
    stock = losses_of(stock_steps(jobs, WORKERS, **SHARED | layout))
    script = FUSED if "use_distributed_optimizer" in layout else PRETRAIN
    model = tiny(**SHARED | layout)
    lost = jobs.run([*model, "--resihp-inject", "kill:3@4"], workers=WORKERS, min_workers=WORKERS, script=script)
    assert lost.code == exit_codes.NO_PLAN, lost.tails()
    if script == FUSED:
        made = emergency(lost.run_dir)
        assert made.returncode == 0, made.stdout + made.stderr
    found = newest_state(lost.run_dir)
    assert found is not None and found[1] == 3
    again = jobs.run([*model, *flags(found[0])], workers=WORKERS, script=script)
    assert again.code == 0, again.tails()
    assert again.summary.loss == pytest.approx({n: stock[n] for n in range(4, 10)}, rel=FP32.loss)


def test_plans_that_cannot_be_run_are_refused(jobs: Jobs, tmp_path: Path) -> None:
    unlike = ParallelPlan((Replica(((0, 1),), (0, 1, 2, 3, 4, 5)),), {2: Coordinate(0, 0), 3: None})
    three = ParallelPlan(tuple(Replica(((worker,),), tuple(range(6))) for worker in range(3)), {3: None}, (), False, 3)
    job = like_stock(jobs, layout=SHARED, resihp_plan=ask_at(tmp_path, (unlike, 2), (three, 5)))
    assert degrees(job) == [(2, 4)]
    first, second = (event["reason"] for event in job.events("change_refused"))
    assert "a job with context parallelism runs uniform plans only" in first
    assert "sequences can be shared by 2 replicas at most, not 3" in second
