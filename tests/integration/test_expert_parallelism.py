# SPDX-License-Identifier: Apache-2.0
"""Experts that replicas share: the job trains what Megatron itself trains, under the job's own degree of expert
parallelism and under smaller ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import (
    BF16,
    BIASED,
    DROPOUT,
    EXPERTS,
    FP32,
    PRETRAIN,
    WISHING,
    Job,
    Jobs,
    Tolerance,
    ask_at,
    check_samples,
    check_training,
    tiny,
)
from stock_runs import (
    NOTING,
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
from test_expert_biases import ROUTED

from megatron_resihp.control import exit_codes
from megatron_resihp.control.worker.saved_state import flags, newest_state
from megatron_resihp.plan import ParallelPlan, Replica

pytestmark = pytest.mark.nightly

WORKERS = 4
LARGE_JOB_S = 300.0
"""Twice as many workers as most jobs have, four times rebuilt."""
SHARED: dict[str, Any] = EXPERTS | {
    "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall",
    "train_iters": 9, "global_batch_size": 8,
}  # fmt: skip
"""Two pairs of workers: each pair shares the experts."""
GATHERED: dict[str, Any] = {"moe_token_dispatcher_type": "allgather"}
SINKHORN: dict[str, Any] = {
    "moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1, "moe_aux_loss_coeff": None,
}  # fmt: skip
DROPPING: dict[str, Any] = {"moe_expert_capacity_factor": 0.75, "moe_pad_expert_input_to_capacity": True}
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2}
WHOLE: dict[str, Any] = TENSOR | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
"""Members of a stage have other experts each, and two replicas share them."""
SWIGLU: dict[str, Any] = {"swiglu": True}
PIPELINE: dict[str, Any] = {
    "pipeline_model_parallel_size": 2, "mtp_num_layers": 1, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
OPTIMIZER: dict[str, Any] = {
    "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True,
    "ddp_bucket_size": 3000,
}  # fmt: skip
INSTANCES: dict[str, Any] = OPTIMIZER | {"num_distributed_optimizer_instances": 2}
"""Of four replicas, each pair has all of the optimizer's state, and each expert once."""
HALF: dict[str, Any] = {
    "fp16": True, "accumulate_allreduce_grads_in_fp32": True, "initial_loss_scale": 2**21, "hysteresis": 1,
    "loss_scale_window": 2,
}  # fmt: skip
"""The first steps are skipped, and some later ones."""

WORKER = tuple(((worker,),) for worker in range(WORKERS))
MEMBERS = tuple(((worker, worker + 1),) for worker in range(0, 2 * WORKERS, 2))
STAGES = tuple(((worker,), (worker + WORKERS,)) for worker in range(WORKERS))
"""The stages of four replicas, as Megatron itself numbers workers."""


def degrees(job: Job) -> list[tuple[int, int]]:
    """Of each epoch: how many replicas share experts, and how many there are."""
    plans = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    return [(plan.expert_parallel, len(plan.replicas)) for plan in plans]


def test_training_shows_in_the_losses(jobs: Jobs) -> None:
    check_that_training_shows(jobs, WORKERS, SHARED)


def test_a_death_and_the_return_of_the_worker(jobs: Jobs) -> None:
    """Three workers have all experts each; with the fourth they share them again."""
    job = like_stock_and_back(jobs, layout=SHARED | {"train_iters": 14})
    assert degrees(job) == [(2, 4), (1, 3), (2, 4)]


@pytest.mark.parametrize("layout", [{}, GATHERED], ids=["all to all", "gathered"])
@pytest.mark.parametrize("point", ["dispatch", "combine", "combine-backward", "dispatch-backward"])
def test_a_death_where_tokens_go_to_experts_and_back(jobs: Jobs, point: str, layout: dict[str, Any]) -> None:
    """The second one leaves a pair, which shares experts again."""
    job = like_stock(jobs, f"kill:1@3:{point}", f"kill:2@6:{point}", layout=SHARED | layout)
    assert degrees(job) == [(2, 4), (1, 3), (2, 2)]


def test_loads_of_experts_are_the_same_under_any_plan(jobs: Jobs) -> None:
    """The death leaves three workers with all experts, which route the tokens that four would have routed. The token
    that a router is as sure of another expert for may go there."""
    whole, broken = (jobs.run(tiny(**SHARED, resihp_inject=deaths), workers=WORKERS) for deaths in (None, "kill:1@1"))
    assert degrees(broken) == [(2, 4), (1, 3)]
    for job in (whole, broken):
        assert [event["iteration"] for event in job.events("expert_loads")] == [2]
    (whole_loads,), (broken_loads,) = (
        (e["busiest_shares"] for e in job.events("expert_loads")) for job in (whole, broken)
    )
    assert whole_loads == pytest.approx(broken_loads, abs=0.01)
    assert whole_loads[0] == 1.0 and 1.0 < whole_loads[1] < 2.0


def test_positions_that_begin_anew_with_each_document(jobs: Jobs) -> None:
    anew: dict[str, Any] = {"position_embedding_type": "learned_absolute", "reset_position_ids": True}
    job = like_stock(jobs, "kill:1@3:dispatch", layout=SHARED | anew)
    assert degrees(job) == [(2, 4), (1, 3)]


@pytest.mark.since_megatron("0.19")
def test_packed_documents(jobs: Jobs, documents: Path) -> None:
    packed: dict[str, Any] = {
        "mock_data": False, "data_path": documents, "data_cache_path": documents.with_name("cache"), "vocab_size": 257,
        "dataloader_inter_document_masking": True, "train_iters": 14,
    }  # fmt: skip
    job = like_stock_and_back(jobs, layout=SHARED | packed)
    assert degrees(job) == [(2, 4), (1, 3), (2, 4)]


def shared_by(degree: int, replicas: Sequence[Sequence[Sequence[int]]], members: int = 0) -> ParallelPlan:
    """Replicas with these stages, of which so many share experts. They have equally many micro-batches. `members`: of a
    stage that have the same experts."""
    dealt = (tuple(range(index, SHARED["global_batch_size"], len(replicas))) for index in range(len(replicas)))
    rows = (Replica(tuple(map(tuple, stages)), numbers) for stages, numbers in zip(replicas, dealt, strict=True))
    return ParallelPlan(tuple(rows), expert_parallel=degree, expert_members=members)


def there_and_back(path: Path, replicas: Sequence[Sequence[Sequence[int]]], members: int = 0) -> dict[str, Any]:
    """Each replica gets all experts, and later they share them again; then a worker dies. `path`: for the plans."""
    last = max(worker for stages in replicas for stage in stages for worker in stage)
    return {
        "resihp_plan": ask_at(path, (shared_by(1, replicas, members), 2), (shared_by(2, replicas, members), 4)),
        "resihp_inject": f"kill:{last}@6:backward",
    }


@pytest.mark.parametrize(
    ("replicas", "layout", "tolerance"),
    [
        (WORKER, {"bf16": True}, BF16),
        (WORKER, GATHERED | SINKHORN, FP32),
        (WORKER, DROPPING, FP32),
        (MEMBERS, TENSOR, FP32),
        (MEMBERS, TENSOR | GATHERED | BIASED, FP32),
        (STAGES, PIPELINE, FP32),
        (WORKER, OPTIMIZER, FP32),
        (WORKER, BIASED | {"use_distributed_optimizer": True, "bf16": True, "moe_router_dtype": "fp32"}, ROUTED),
        (MEMBERS, TENSOR | OPTIMIZER, FP32),
        (MEMBERS, WHOLE, FP32),
        (MEMBERS, WHOLE | GATHERED | BIASED | SWIGLU, FP32),
        (MEMBERS, WHOLE | OPTIMIZER, FP32),
        (WORKER, INSTANCES, FP32),
        (MEMBERS, TENSOR | INSTANCES | SINKHORN | {"bf16": True}, BF16),
        (MEMBERS, WHOLE | INSTANCES, FP32),
    ],
    ids=[
        "bf16", "gathered, sinkhorn", "dropping", "tensor", "tensor, gathered, biased", "stages", "optimizer",
        "optimizer, biased, bf16", "optimizer, tensor", "whole", "whole, gathered, biased, gated", "whole, optimizer",
        "instances", "tensor, instances, sinkhorn, bf16", "whole, instances",
    ],
)  # fmt: skip
def test_a_change_there_and_back_and_a_death(
    jobs: Jobs, tmp_path: Path, replicas: Any, layout: dict[str, Any], tolerance: Tolerance
) -> None:
    layout, workers = SHARED | layout, len(replicas) * sum(map(len, replicas[0]))
    stock = stock_steps(jobs, workers, **layout)
    members = 1 if layout["expert_model_parallel_size"] > 2 else 0
    asked = there_and_back(tmp_path, replicas, members)
    job = jobs.start(tiny(**layout, **asked), workers=workers).wait(LARGE_JOB_S)
    check_like_stock(job, stock, tolerance)
    check_samples(job)
    assert degrees(job) == [(2, 4), (1, 4), (2, 4), (1, 3)]


@pytest.mark.parametrize("layout", [DROPOUT | {"moe_input_jitter_eps": 0.1}, HALF], ids=["dropout", "fp16"])
def test_what_stock_megatron_draws_or_skips_otherwise(jobs: Jobs, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Masks, and the steps that overflow, are those of the undisturbed job."""
    reference = jobs.reference(tiny(**SHARED | layout), workers=WORKERS)
    job = jobs.run(tiny(**SHARED | layout, **there_and_back(tmp_path, WORKER)), workers=WORKERS)
    check_training(job, reference, BF16 if "fp16" in layout else FP32)
    assert degrees(job) == [(2, 4), (1, 4), (2, 4), (1, 3)]
    skipped = reference.summary.skipped_iterations
    assert job.summary.skipped_iterations == skipped and bool(skipped) == ("fp16" in layout)


def test_the_last_two_share_and_keep_copies_of_each_others_experts(jobs: Jobs) -> None:
    """The last one goes on with the other's experts, which it has copies of only."""
    layout = SHARED | OPTIMIZER
    stock = stock_steps(jobs, WORKERS, **layout)
    deaths = ["kill:1@3:gather", "kill:2@6:step", "kill:3@8:backward"]
    job = jobs.run(tiny(**layout, resihp_inject=deaths), workers=WORKERS)
    check_like_stock(job, stock)
    check_samples(job)
    assert degrees(job) == [(2, 4), (1, 3), (2, 2), (1, 1)]


def test_an_instance_of_the_optimizer_dies_whole(jobs: Jobs) -> None:
    """The other one has all of the state, and owners keep no copies as long as it does."""
    pytest.importorskip("einops", reason="einops is not installed: Megatron makes the groups of instances with it")
    layout = SHARED | INSTANCES
    stock = stock_steps(jobs, WORKERS, **layout)
    whole, job = (
        jobs.run(tiny(**layout, resihp_inject=deaths), workers=WORKERS)
        for deaths in (None, ["kill:0@3:step", "kill:1@3:step"])
    )
    for each, keepers in ((whole, set()), (job, {2, 3})):
        check_like_stock(each, stock)
        check_samples(each)
        assert {event["worker"] for event in each.events("optimizer_copy")} == keepers
    assert degrees(job)[0] == (2, 4) and degrees(job)[-1] == (2, 2)


def test_several_of_each_expert_in_an_instance_of_the_optimizer(jobs: Jobs) -> None:
    """Copies then are of other parts. Three of each expert are one instance."""
    pytest.importorskip("einops", reason="einops is not installed: Megatron makes the groups of instances with it")
    layout = SHARED | INSTANCES | {"train_iters": 12}
    job = like_stock_and_back(jobs, layout=layout, workers=2 * WORKERS)
    assert degrees(job) == [(2, 8), (2, 6), (2, 8)]


@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        ({}, FP32),
        ({"ckpt_format": "torch"}, FP32),
        (OPTIMIZER, FP32),
        (INSTANCES, FP32),
        ({"use_distributed_optimizer": True, "bf16": True}, BF16),
        ({"use_distributed_optimizer": True, "ckpt_format": "torch", "swiglu": True}, FP32),
    ],
    ids=["distributed", "by rank", "optimizer", "instances", "optimizer, bf16", "optimizer, by rank, gated"],
)
def test_a_checkpoint_of_a_smaller_degree(
    jobs: Jobs, tmp_path: Path, layout: dict[str, Any], tolerance: Tolerance
) -> None:
    """Stock Megatron goes on from it under the job's own degree, and so does a job that then shares no experts."""
    stock = losses_of(stock_steps(jobs, WORKERS, **SHARED | layout))
    path = tmp_path / "saved"
    saving = {"save": path, "save_interval": 6, "exit_interval": 6}
    job = jobs.run(tiny(**SHARED | layout | saving, resihp_inject="kill:3@3"), workers=WORKERS)
    assert job.code == 0 and degrees(job) == [(2, 4), (1, 3)], job.tails()
    expected = {number: stock[number] for number in (7, 8, 9)}
    loading = SHARED | layout | {"load": path, "ckpt_format": "torch_dist"}
    script = FUSED if "use_distributed_optimizer" in layout else PRETRAIN
    losses = stock_losses(jobs, script, WORKERS, **loading)
    assert losses == pytest.approx(as_stock_says(expected), rel=tolerance.loss)
    alone = ask_at(tmp_path, (shared_by(1, WORKER), 7))
    job = jobs.run(tiny(**loading, resihp_plan=alone), workers=WORKERS, script=script)
    assert job.code == 0 and degrees(job) == [(2, 4), (1, 4)], job.tails()
    assert job.summary.loss == pytest.approx(expected, rel=tolerance.loss)


def check_gone_on_from(
    lost: Job, jobs: Jobs, workers: int, layout: dict[str, Any], tolerance: Tolerance = FP32,
    scripts: tuple[Path, Path] = (FUSED, NOTING),
) -> None:  # fmt: skip
    """What the survivors of a death in iteration 4 have saved is put together, and the job goes on from that.
    `scripts`: of the job, and of stock Megatron."""
    made = emergency(lost.run_dir)
    assert made.returncode == 0, made.stdout + made.stderr
    found = newest_state(lost.run_dir)
    assert found is not None and found[1] == 3
    again = jobs.run([*tiny(**layout), *flags(found[0])], workers=workers, script=scripts[0])
    assert again.code == 0, again.tails()
    stock = losses_of(stock_steps(jobs, workers, scripts[1], **layout))
    assert again.summary.loss == pytest.approx({n: stock[n] for n in range(4, 10)}, rel=tolerance.loss)


@pytest.mark.parametrize(
    ("workers", "layout"),
    [(WORKERS, {}), (WORKERS, OPTIMIZER), (2 * WORKERS, WHOLE), (2 * WORKERS, WHOLE | OPTIMIZER)],
    ids=["plain", "optimizer", "whole", "whole, optimizer"],
)
def test_what_survivors_saved_is_gone_on_from(jobs: Jobs, workers: int, layout: dict[str, Any]) -> None:
    """They are too few for the user, and save what they have; the job goes on from that under its own degree."""
    layout = SHARED | layout
    lost = jobs.run(tiny(**layout, resihp_inject="kill:3@4"), workers=workers, min_workers=workers, script=FUSED)
    assert lost.code == exit_codes.NO_PLAN, lost.tails()
    check_gone_on_from(lost, jobs, workers, layout)


@pytest.mark.parametrize("layout", [{}, OPTIMIZER], ids=["plain", "optimizer"])
def test_members_of_one_replica_that_share_experts(jobs: Jobs, layout: dict[str, Any]) -> None:
    """As two pairs: those of a pair have parts of the same experts, in each replica. A replica is lost, and comes back
    with the worker."""
    layout = SHARED | TENSOR | layout | {"tensor_model_parallel_size": 4, "train_iters": 14}
    stock = stock_steps(jobs, 2 * WORKERS, **layout)
    arguments = tiny(**layout, resihp_inject="kill:5@3")
    job = jobs.start(arguments, workers=2 * WORKERS, max_restarts=1, script=WISHING, wishes=["hold-0-7"])
    job.await_event("worker_waiting", waiting=13)
    job.wish("go_on")
    assert job.wait(LARGE_JOB_S).code == 0, job.tails()
    check_like_stock(job, stock)
    check_samples(job)
    assert degrees(job) == [(1, 2), (1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("workers", "layout"),
    [
        (4, {"tensor_model_parallel_size": 2}),
        (
            8,
            {
                "context_parallel_size": 2, "expert_tensor_parallel_size": 2, "pipeline_model_parallel_size": 2,
                "use_tp_pp_dp_mapping": True,
            },
        ),
    ],
    ids=["smaller", "larger, shared sequences"],
)  # fmt: skip
def test_without_experts_their_tensor_parallel_size_does_nothing(
    jobs: Jobs, workers: int, layout: dict[str, Any]
) -> None:
    layout = {"train_iters": 9, "global_batch_size": 8, "expert_tensor_parallel_size": 1} | layout
    stock = stock_steps(jobs, workers, **layout)
    job = jobs.run(tiny(**layout, resihp_inject="kill:1@3"), workers=workers)
    check_like_stock(job, stock)
    check_samples(job)
    assert len(job.events("epoch_started")) == 2, job.tails()
