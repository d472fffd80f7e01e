# SPDX-License-Identifier: Apache-2.0
"""Jobs whose own pipeline is interleaved: each worker has several chunks of layers, by Megatron's own flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import BF16, DROPOUT, EXPERTS, FP32, PRETRAIN, WISHING, Job, Jobs, ask_at, check_training, tiny
from stock_runs import check_like_stock, stock_losses, stock_steps
from test_checkpoints import as_stock_says
from test_detection import TIME_SCALE, WARM_UP
from test_distributed_optimizer import SHARED
from test_plan_failures import are_heterogeneous
from test_plans import FOUR, PER_TOKEN, UNIFORM_LAYOUT, UNTIED, chunks, stages, survive
from test_plans import own_plan as tensor_parallel_plan
from test_recovery_points import EVALUATION, evaluations

from megatron_resihp.control import exit_codes
from megatron_resihp.cost.profile import BUILT_IN
from megatron_resihp.detector.judging.learned import load as learned
from megatron_resihp.plan import Chunk, ParallelPlan, Replica
from megatron_resihp.plan.slots import renamed

NIGHTLY = pytest.mark.nightly
INTERLEAVED: dict[str, Any] = {
    "num_layers": 4, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1,
    "global_batch_size": 8, "train_iters": 12,
}  # fmt: skip
"""On four workers two replicas. Workers 0 and 1 have layers 0, 1 and 3; workers 2 and 3 have 2, 4 and the head."""
LAYOUT: dict[str, Any] = {
    "num_layers_per_virtual_pipeline_stage": None, "pipeline_model_parallel_layout": "E|t|tt|tL",
}  # fmt: skip
"""The embedding has a chunk of its own."""
ENDS: dict[str, Any] = {
    "num_layers": 6, "num_layers_per_virtual_pipeline_stage": None, "num_virtual_stages_per_pipeline_rank": 2,
    "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
}  # fmt: skip
FIRST: dict[str, Any] = {
    "num_layers": 6, "num_layers_per_virtual_pipeline_stage": None, "num_virtual_stages_per_pipeline_rank": 2,
    "decoder_first_pipeline_num_layers": 2,
}  # fmt: skip
"""The first stage has two decoder layers, the last one four."""
GROUPS: dict[str, Any] = {
    "microbatch_group_size_per_virtual_pipeline_stage": 3, "overlap_p2p_communication_warmup_flush": True,
    "global_batch_size": 10,
}  # fmt: skip
"""Each replica has a group of three micro-batches and one of two."""
GATHERED: dict[str, Any] = SHARED | {
    "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 3000,
}  # fmt: skip
GATHERED_AT_ONCE: dict[str, Any] = SHARED | {
    "overlap_grad_reduce": True, "overlap_param_gather": True, "overlap_param_gather_with_optimizer_step": True,
    "check_weight_hash_across_dp_replicas_interval": 3, "ckpt_format": "torch",
}  # fmt: skip
OWN_LAYERS = (Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(0, 3, 4), Chunk(1, 4, 6))
UNLIKE = ParallelPlan((
    Replica(stages([3], [0]), (0, 2, 4, 6), chunks(2, 6)), Replica(stages([1]), (1, 3, 5, 7), chunks(6)),
))  # fmt: skip
"""Worker 3, of the last stage, has the embedding, and worker 1 has everything."""


def own_plan(*replicas: tuple[int, int]) -> ParallelPlan:
    """Replicas of the job's own layout. `replicas`: the worker of each stage."""
    return ParallelPlan(tuple(
        Replica(stages(*([worker] for worker in workers)), tuple(range(number, 8, len(replicas))))
        for number, workers in enumerate(replicas)
    ))  # fmt: skip


def test_a_worker_dies_and_another_plan_comes_and_goes(jobs: Jobs, tmp_path: Path) -> None:
    """The last of two replicas goes on with all micro-batches in Megatron's own order; then others get its layers.
    Each micro-batch has the masks that it would have had."""
    words = ask_at(tmp_path, (UNLIKE, 5), (own_plan((0, 3)), 8))
    model = INTERLEAVED | DROPOUT
    reference = jobs.reference(tiny(**model), workers=4)
    job = jobs.run(tiny(**model, resihp_inject="kill:2@3:backward", resihp_plan=words), workers=4)
    check_training(job, reference)
    assert are_heterogeneous(job) == [False, False, True, False]


@NIGHTLY
@pytest.mark.parametrize(
    "model",
    [{}, LAYOUT | UNTIED, ENDS | PER_TOKEN, GROUPS, SHARED],
    ids=["layers", "layout", "ends", "groups", "shared"],
)
def test_without_a_death_it_trains_what_stock_megatron_trains(jobs: Jobs, model: dict[str, Any]) -> None:
    job = jobs.reference(tiny(**INTERLEAVED | model), workers=4)
    check_like_stock(job, stock_steps(jobs, 4, **INTERLEAVED | model))


@NIGHTLY
def test_the_comparison_with_stock_megatron_can_fail(jobs: Jobs) -> None:
    other = stock_steps(jobs, 4, **INTERLEAVED | {"lr": "0", "min_lr": "0"})
    with pytest.raises(AssertionError):
        check_like_stock(jobs.reference(tiny(**INTERLEAVED), workers=4), other)


@NIGHTLY
@pytest.mark.parametrize(
    ("model", "workers"),
    [
        (LAYOUT | UNTIED, 4),
        (ENDS | PER_TOKEN, 4),
        (FIRST, 4),
        (GROUPS, 4),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 3000}, 4),
        ({"pipeline_model_parallel_size": 3, "num_layers": 6, "no_overlap_p2p_communication": True}, 6),
        (EXPERTS | {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 8),
        (GATHERED, 4),
        (GATHERED | {"no_align_param_gather": True}, 4),
    ],
    ids=[
        "layout", "ends", "unlike stages", "groups", "overlap", "three stages", "experts", "overlap, shared",
        "overlap, each chunk by itself",
    ],
)  # fmt: skip
def test_a_death_in_other_layouts(jobs: Jobs, model: dict[str, Any], workers: int) -> None:
    model = INTERLEAVED | model | ({"global_batch_size": 12} if workers == 6 else {})
    job = jobs.run(tiny(**model, resihp_inject="kill:3@4:grad-sync"), workers=workers)
    check_training(job, jobs.reference(tiny(**model), workers=workers))
    assert are_heterogeneous(job) == [False, False]


@NIGHTLY
@pytest.mark.parametrize(
    ("model", "tolerance"),
    [(SHARED, FP32), (SHARED | {"bf16": True}, BF16), (LAYOUT, FP32)],
    ids=["shared", "bf16", "tied"],
)
def test_a_death_then_other_plans(jobs: Jobs, tmp_path: Path, model: dict[str, Any], tolerance: Any) -> None:
    """With the distributed optimizer each worker's parts are of several chunks."""
    words = ask_at(tmp_path, (UNLIKE, 5), (own_plan((0, 3)), 8))
    model = INTERLEAVED | model
    job = jobs.run(tiny(**model, resihp_inject="kill:2@3:step", resihp_plan=words), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4), tolerance)
    assert are_heterogeneous(job) == [False, False, True, False]


@NIGHTLY
@pytest.mark.parametrize(("precision", "tolerance"), [({}, FP32), ({"bf16": True}, BF16)], ids=["fp32", "bf16"])
def test_deaths_while_the_first_chunk_is_gathered(
    jobs: Jobs, tmp_path: Path, precision: dict[str, Any], tolerance: Any
) -> None:
    """Each chunk group has an optimizer of its own; the gathering of the first one begins before the second steps."""
    words, model = ask_at(tmp_path, (UNLIKE, 5), (own_plan((0, 3)), 8)), INTERLEAVED | GATHERED_AT_ONCE | precision
    job = jobs.run(tiny(**model, resihp_inject="kill:2@3:step", resihp_plan=words), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4), tolerance)
    assert are_heterogeneous(job) == [False, False, True, False]
    died_gathering = jobs.run(tiny(**model, resihp_inject="kill:1@4:gather"), workers=4)
    check_training(died_gathering, jobs.reference(tiny(**model), workers=4), tolerance)
    check_like_stock(jobs.reference(tiny(**model), workers=4), stock_steps(jobs, 4, **model), tolerance)


@NIGHTLY
@pytest.mark.parametrize("model", [{}, SHARED | {"sequence_parallel": True}], ids=["whole", "shared"])
def test_stages_of_other_degrees(jobs: Jobs, tmp_path: Path, model: dict[str, Any]) -> None:
    """Megatron derives what it needs for a degree from the job's own flags, those of its chunks among them."""
    plans = [*(FOUR[name] for name in ("TP 4", "V shape", "TP 2 and 1")), tensor_parallel_plan(4)]
    own = INTERLEAVED | UNIFORM_LAYOUT | {"train_iters": 15}
    survive(jobs, tmp_path, plans, workers=4, **own | model)


@pytest.mark.since_megatron("0.19")
@NIGHTLY
def test_packed_documents(jobs: Jobs, documents: Path, tmp_path: Path) -> None:
    """Every chunk reads its micro-batches itself, of which each sample counts once."""
    model = INTERLEAVED | {
        "mock_data": False, "data_path": documents, "vocab_size": 257, "dataloader_inter_document_masking": True,
        "data_cache_path": documents.with_name("cache"),
    }  # fmt: skip
    words = ask_at(tmp_path, (UNLIKE, 5), (own_plan((0, 3)), 8))
    job = jobs.run(tiny(**model, resihp_inject="kill:2@3:backward", resihp_plan=words), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4))


@NIGHTLY
def test_replicas_with_fewer_micro_batches_than_stages(jobs: Jobs, tmp_path: Path) -> None:
    """Megatron's schedule can't run the second replica's, so the plan is run as a heterogeneous one."""
    uneven = ParallelPlan((Replica(stages([0], [2]), tuple(range(7))), Replica(stages([1], [3]), (7,))))
    words = ask_at(tmp_path, (uneven, 3), (own_plan((0, 2), (1, 3)), 7))
    job = jobs.run(tiny(**INTERLEAVED, resihp_plan=words), workers=4)
    check_training(job, jobs.reference(tiny(**INTERLEAVED), workers=4))
    assert are_heterogeneous(job) == [False, True, False]
    assert ParallelPlan.from_dict(job.events("epoch_started")[1]["plan"]).replicas[0].chunks == OWN_LAYERS


@NIGHTLY
def test_survivors_share_micro_batches_out_in_whole_groups(jobs: Jobs) -> None:
    """Of four replicas three are left. After the second death a standby takes a place in one of them."""
    model = INTERLEAVED | {"global_batch_size": 16, "num_layers": 4}
    job = jobs.run(tiny(**model, resihp_inject=["kill:5@3:backward", "kill:0@6:norm"]), workers=8)
    check_training(job, jobs.reference(tiny(**model), workers=8))
    counts = [
        [len(replica.micro_batches) for replica in ParallelPlan.from_dict(event["plan"]).replicas]
        for event in job.events("epoch_started")
    ]
    assert counts == [[4, 4, 4, 4], [6, 6, 4], [6, 6, 4]]


@NIGHTLY
def test_evaluation(jobs: Jobs, tmp_path: Path) -> None:
    model = INTERLEAVED | EVALUATION
    words = ask_at(tmp_path, (UNLIKE, 6))
    reference = jobs.reference(tiny(**model), workers=4)
    job = jobs.run(tiny(**model, resihp_inject="kill:2@4:evaluate", resihp_plan=words), workers=4)
    check_training(job, reference)
    assert evaluations(job) == evaluations(reference) and evaluations(job)


@NIGHTLY
@pytest.mark.parametrize("model", [{}, SHARED], ids=["whole", "shared"])
def test_who_died_comes_back(jobs: Jobs, model: dict[str, Any]) -> None:
    model = INTERLEAVED | model | {"train_iters": 14}
    job = jobs.start(
        tiny(**model, resihp_inject="kill:3@3"), workers=4, max_restarts=1, script=WISHING, wishes=["hold-0-7"]
    )
    job.await_event("worker_waiting", waiting=7, place=3)
    job.wish("go_on")
    check_training(job.wait(), jobs.reference(tiny(**model), workers=4))
    first, _, again = (ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started"))
    assert again == renamed(first, lambda worker: 7 if worker == 3 else worker)


@NIGHTLY
@pytest.mark.usefixtures("compiled_planner")
def test_a_strategy_plans_for_the_survivors(jobs: Jobs) -> None:
    strategy = {"resihp_emulate": "h800", "resihp_strategy": "joint", "resihp_plan_wait": 60.0}
    arguments = tiny(**INTERLEAVED, **strategy, resihp_inject="kill:3@5:backward")
    job = jobs.start(arguments, workers=4).wait(240.0)
    check_training(job, jobs.reference(tiny(**INTERLEAVED), workers=4))
    [planned] = job.events("planned")
    assert planned["strategy"] == "joint" and planned["bound_s"] <= planned["iteration_s"]
    assert set(ParallelPlan.from_dict(job.events("epoch_started")[-1]["plan"]).working) == {0, 1, 2}


@NIGHTLY
@pytest.mark.usefixtures("compiled_planner")
def test_a_slow_worker_is_named_and_nothing_else_is(jobs: Jobs, tmp_path: Path) -> None:
    """Ops of each chunk have costs of their own."""
    profile = json.loads((BUILT_IN / "h800.json").read_text()) | {"time_scale": TIME_SCALE}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    slow, cleared = WARM_UP + 10, WARM_UP + 22
    model = INTERLEAVED | {"global_batch_size": 4, "train_iters": cleared + 13}
    injections = [f"slow:3:0.7@{slow}", f"clear@{cleared}"]
    job = jobs.start(tiny(**model, resihp_emulate=tmp_path / "profile.json", resihp_inject=injections), workers=4).wait(
        240.0
    )
    assert job.code == 0 and job.events("detection")[-1]["warm"], job.tails()
    found = [(event["workers"], event["change"]) for event in job.events("verdict")]
    assert found == [([3], "onset"), ([3], "recovery")]
    assert learned(job.run_dir / "cost_model.json").model.ops.gamma.shape[2] == 2


# ---- checkpoints

SAVED = 6
PLAIN: dict[str, Any] = {"num_layers_per_virtual_pipeline_stage": None}


def rest_of(reference: Job) -> dict[int, float]:
    return {number: loss for number, loss in reference.summary.loss.items() if number > SAVED}


def save(jobs: Jobs, path: Path, **options: Any) -> None:
    """A job that has lost a worker saves halfway and ends."""
    saving = {"save": path, "save_interval": SAVED, "exit_interval": SAVED, "resihp_inject": "kill:2@3:backward"}
    job = jobs.run(tiny(**INTERLEAVED | saving | options), workers=4)
    assert job.code == 0, job.tails()


@NIGHTLY
@pytest.mark.parametrize(
    ("saving", "loading"),
    [({}, {}), ({}, PLAIN), ({"ckpt_format": "torch"}, {"ckpt_format": "torch"})],
    ids=["interleaved", "plain", "older format"],
)
def test_stock_megatron_goes_on_from_a_checkpoint(
    jobs: Jobs, tmp_path: Path, saving: dict[str, Any], loading: dict[str, Any]
) -> None:
    """Saved by the one replica that is left."""
    save(jobs, tmp_path, **saving)
    losses = stock_losses(jobs, PRETRAIN, 2, **INTERLEAVED | loading, load=tmp_path)
    reference = jobs.reference(tiny(**INTERLEAVED), workers=4)
    assert losses == pytest.approx(as_stock_says(rest_of(reference)), rel=1e-5)


@NIGHTLY
@pytest.mark.parametrize("unlike", [False, True], ids=["by Megatron's groups", "heterogeneous"])
def test_a_job_goes_on_from_a_checkpoint(jobs: Jobs, tmp_path: Path, unlike: bool) -> None:
    """Also one saved by stages of other layers."""
    save(jobs, tmp_path / "saved", **({"resihp_plan": ask_at(tmp_path, (UNLIKE, 5))} if unlike else {}))
    job = jobs.run(tiny(**INTERLEAVED, load=tmp_path / "saved"), workers=4)
    assert job.code == 0, job.tails()
    reference = jobs.reference(tiny(**INTERLEAVED), workers=4)
    assert job.summary.loss == pytest.approx(rest_of(reference), rel=1e-5)


@NIGHTLY
def test_survivors_save_what_they_hold(jobs: Jobs) -> None:
    """Both holders of the last stage die; what is missing is named once, though it is several chunks."""
    injections = ["kill:2@4:backward", "kill:3@4:backward"]
    job = jobs.run(tiny(**INTERLEAVED, resihp_inject=injections), workers=4)
    assert job.code == exit_codes.NO_PLAN, job.tails()
    [saved] = job.summary.salvages
    assert saved.missing == ((1, 0),) and not saved.complete and Path(saved.path).is_file()


@NIGHTLY
def test_a_job_goes_on_from_what_survivors_have_saved(jobs: Jobs) -> None:
    injections = [f"rebuild:0@3:{point}" for point in ["backward"] * 12]
    first = jobs.run(tiny(**INTERLEAVED, resihp_inject=injections), workers=4)
    assert first.code == exit_codes.NO_PLAN and all(each.complete for each in first.summary.salvages)
    going_on = {"load": first.run_dir / "emergency_checkpoint", "ckpt_format": "torch", "no_load_rng": True}
    second = jobs.run(tiny(**INTERLEAVED, **going_on), workers=4)
    assert second.code == 0, second.tails()
    reference = jobs.reference(tiny(**INTERLEAVED), workers=4)
    whole = {number: loss for number, loss in reference.summary.loss.items() if number > 2}
    assert second.summary.loss == pytest.approx(whole, rel=1e-5)
