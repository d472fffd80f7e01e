# SPDX-License-Identifier: Apache-2.0
"""Replicas that share sequences and experts, too: the job trains what Megatron itself trains, under the job's own
numbers of both and under smaller ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import DROPOUT, EXPERTS, FP32, PRETRAIN, Job, Jobs, check_training, tiny
from stock_runs import check_that_training_shows, like_stock, like_stock_and_back, losses_of, stock_losses, stock_steps
from test_checkpoints import FUSED, as_stock_says
from test_emergency import emergency
from test_expert_parallelism import DROPPING, OPTIMIZER, SINKHORN, TENSOR
from test_plans import balances

from megatron_resihp.control import exit_codes
from megatron_resihp.control.worker.saved_state import flags, newest_state
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.report.run.summary import compare

pytestmark = pytest.mark.nightly

WORKERS = 4
LARGE_JOB_S = 300.0
BOTH: dict[str, Any] = EXPERTS | {
    "context_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall", "train_iters": 9, "global_batch_size": 6,
}  # fmt: skip
"""Two pairs of workers: each pair shares its sequences, and the experts."""


def degrees(job: Job) -> list[tuple[int, int, int]]:
    """Of each epoch: how many replicas share each sequence, how many share experts, and how many there are."""
    plans = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    return [(plan.context_parallel, plan.expert_parallel, len(plan.replicas)) for plan in plans]


def test_training_shows_in_the_losses(jobs: Jobs) -> None:
    check_that_training_shows(jobs, WORKERS, BOTH)


def test_a_death_and_the_return_of_the_worker(jobs: Jobs) -> None:
    """Three workers train sequences of their own with all experts; with the fourth they share both again."""
    job = like_stock_and_back(jobs, layout=BOTH | {"train_iters": 14})
    assert degrees(job) == [(2, 2, 4), (1, 1, 3), (2, 2, 4)]


@pytest.mark.parametrize("point", ["dispatch", "dispatch-backward", "context", "context-backward"])
def test_a_death_where_those_that_share_meet(jobs: Jobs, point: str) -> None:
    job = like_stock(jobs, f"kill:1@3:{point}", layout=BOTH)
    assert degrees(job) == [(2, 2, 4), (1, 1, 3)]


@pytest.mark.parametrize("point", ["forward", "backward", "grad-sync"])
def test_a_death_at_any_point(jobs: Jobs, point: str) -> None:
    """The second one leaves a pair, which shares both again."""
    job = like_stock(jobs, f"kill:1@3:{point}", f"kill:2@6:{point}", layout=BOTH)
    assert degrees(job) == [(2, 2, 4), (1, 1, 3), (2, 2, 2)]


def test_what_is_told_of_balance_does_not_depend_on_who_shares(jobs: Jobs) -> None:
    """Before the death, two workers tell of their tokens of a sequence. After it, one tells of all of them."""
    job = jobs.run(tiny(**BOTH, resihp_inject="kill:1@4:backward"), workers=WORKERS)
    assert job.code == 0 and degrees(job) == [(2, 2, 4), (1, 1, 3)], job.tails()
    told, undisturbed = balances(job), balances(jobs.reference(tiny(**BOTH), workers=WORKERS))
    assert told.keys() == undisturbed.keys() and all("z_loss" in each for each in told.values())
    for iteration, expected in undisturbed.items():
        assert told[iteration] == pytest.approx(expected, rel=FP32.loss)


@pytest.mark.parametrize("layout", [SINKHORN, DROPPING], ids=["sinkhorn", "dropping"])
def test_routers_that_look_at_a_workers_own_tokens_keep_their_sequences_cut(jobs: Jobs, layout: dict[str, Any]) -> None:
    job = like_stock(jobs, "kill:1@4:backward", layout=BOTH | layout)
    assert degrees(job) == [(2, 2, 4), (2, 2, 2)]


def test_dropout_where_sequences_stay_cut(jobs: Jobs) -> None:
    """A token's mask is that of its place on its worker, which never changes."""
    layout = BOTH | SINKHORN | DROPOUT
    job = jobs.run(tiny(**layout, resihp_inject="kill:1@4:backward"), workers=WORKERS)
    check_training(job, jobs.reference(tiny(**layout), workers=WORKERS))
    assert degrees(job) == [(2, 2, 4), (2, 2, 2)]
    dry = jobs.reference(tiny(**BOTH | SINKHORN), workers=WORKERS)
    assert (compare(job.summary.loss, dry.summary.loss) or 0) > 1e-3


@pytest.mark.parametrize(
    ("layout", "workers", "first", "second"),
    [
        ({"expert_model_parallel_size": 4}, 8, (2, 4, 8), (2, 2, 6)),
        ({"context_parallel_size": 4}, 8, (4, 2, 8), (2, 2, 6)),
        (OPTIMIZER, 4, (2, 2, 4), (1, 1, 3)),
        (TENSOR, 8, (2, 2, 4), (1, 1, 3)),
        ({"pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True}, 8, (2, 2, 4), (1, 1, 3)),
        ({"expert_model_parallel_size": 1}, 4, (2, 1, 4), (1, 1, 3)),
    ],
    ids=["more experts", "more sequences", "optimizer", "tensor", "stages first", "experts of their own"],
)  # fmt: skip
def test_a_death_in_other_layouts(
    jobs: Jobs, layout: dict[str, Any], workers: int, first: tuple[int, int, int], second: tuple[int, int, int]
) -> None:
    size = {"global_batch_size": 8} if workers == 8 else {}
    job = like_stock(jobs, "kill:1@4:backward", layout=BOTH | size | layout, workers=workers)
    assert degrees(job) == [first, second]


@pytest.mark.parametrize("layout", [{}, OPTIMIZER], ids=["plain", "optimizer"])
def test_a_checkpoint_of_smaller_numbers(jobs: Jobs, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Stock Megatron goes on from it under the job's own."""
    stock = losses_of(stock_steps(jobs, WORKERS, **BOTH | layout))
    saving = {"save": tmp_path / "saved", "save_interval": 6, "exit_interval": 6}
    job = jobs.run(tiny(**BOTH | layout | saving, resihp_inject="kill:3@3"), workers=WORKERS)
    assert job.code == 0 and degrees(job) == [(2, 2, 4), (1, 1, 3)], job.tails()
    loading = BOTH | layout | {"load": tmp_path / "saved", "ckpt_format": "torch_dist"}
    losses = stock_losses(jobs, FUSED if layout else PRETRAIN, WORKERS, **loading)
    assert losses == pytest.approx(as_stock_says({number: stock[number] for number in (7, 8, 9)}), rel=FP32.loss)


@pytest.mark.parametrize("layout", [{}, OPTIMIZER], ids=["plain", "optimizer"])
def test_what_survivors_saved_is_gone_on_from(jobs: Jobs, layout: dict[str, Any]) -> None:
    """They are too few for the user, and save what they have; the job goes on from that under its own numbers."""
    stock = losses_of(stock_steps(jobs, WORKERS, **BOTH | layout))
    model = tiny(**BOTH | layout)
    lost = jobs.run([*model, "--resihp-inject", "kill:3@4"], workers=WORKERS, min_workers=WORKERS, script=FUSED)
    assert lost.code == exit_codes.NO_PLAN, lost.tails()
    made = emergency(lost.run_dir)
    assert made.returncode == 0, made.stdout + made.stderr
    found = newest_state(lost.run_dir)
    assert found is not None and found[1] == 3
    again = jobs.run([*model, *flags(found[0])], workers=WORKERS, script=FUSED)
    assert again.code == 0, again.tails()
    assert again.summary.loss == pytest.approx({n: stock[n] for n in range(4, 10)}, rel=FP32.loss)
