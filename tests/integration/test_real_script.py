# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own pretrain_gpt.py, unmodified, with Megatron from the same checkout.

The environment variable MEGATRON_LM_DIR names the checkout, at tag core_v0.19.0 or core_v0.18.2; it is not
written to.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
from jobs import (
    BF16,
    DROPOUT,
    FP32,
    LINEAR,
    Job,
    Jobs,
    Nursery,
    Tolerance,
    ask_at,
    ask_for,
    check_training,
    environment_of,
    tiny,
)
from launched import is_alive
from stock_runs import torchrun_losses
from test_additional_rounds import FOUR as SHARED_BY_FOUR
from test_additional_rounds import counts
from test_async_saves import ASYNC
from test_attention_logits import CLIPPED
from test_batches import GROWING, SAMPLES, SIZES
from test_checkpoints import as_stock_says, rest_of, save
from test_context_parallelism import OPTIMIZER, SHARED, TENSOR, degrees
from test_distributed_muon import DEALT
from test_expert_overlap import OVERLAPPED
from test_expert_parallelism import SHARED as SHARED_EXPERTS
from test_flags import TWO
from test_interleaved import INTERLEAVED, UNLIKE
from test_interleaved import own_plan as interleaved_plan
from test_logs import PIPELINE, check_files, logged
from test_nodes import TWO_NODES, free_port, late_node
from test_overlap import GATHERED
from test_plan_failures import are_heterogeneous
from test_plans import FOUR, GROUPED, LLAMA, MODEL, PER_TOKEN, UNIFORM_LAYOUT, own_plan, stages, survive
from test_query_groups import plan
from test_recovery_points import EVALUATION, evaluations
from test_shared_experts import OVERLAPPED as AT_ONCE
from test_sharing_both import BOTH

from megatron_resihp.cli import main
from megatron_resihp.control import exit_codes
from megatron_resihp.control.worker.saved_state import flags, newest_state
from megatron_resihp.events.log import FILE_NAME, read_events
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.report.run.summary import compare, summarize_log

CHECKOUT: Final = "MEGATRON_LM_DIR"
WHY: Final = f"{CHECKOUT} is not set: it names a checkout of Megatron-LM, whose own pretrain_gpt.py is tested here"
NO_MUON: Final = "emerging-optimizers is not installed: Megatron takes Muon from it"
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(CHECKOUT not in os.environ, reason=WHY)]

ONE_KEY: dict[str, Any] = GROUPED | {"num_query_groups": 1}
RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
MASKED: Final = Tolerance(0.01, 0.3)
"""Other masks than the undisturbed run's: seen are 0.0013 and 0.08, where losses fall by 8 %."""
DEGREES = ("TP 4", "TP 1", "TP 2 and 1")
LAUNCHED_S: Final = 200.0
CHUNKS = ("interleaved", "V shape", "V shape, W apart")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script in a copy of what it needs of the checkout, with the helper that is compiled on a cluster's nodes."""
    checkout, copied = Path(os.environ[CHECKOUT]), tmp_path_factory.mktemp("checkout")
    for file in checkout.glob("*.py"):
        shutil.copy(file, copied)
    shutil.copytree(checkout / "megatron", copied / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    helpers = find_spec("megatron.core.datasets.helpers_cpp")
    assert helpers is not None and helpers.origin is not None
    shutil.copy(helpers.origin, copied / "megatron" / "core" / "datasets")
    return copied / "pretrain_gpt.py"


@pytest.fixture(scope="module")
def jobs(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """As in other tests, but of that script."""
    nursery = Nursery(script)
    yield Jobs(nursery, tmp_path_factory.mktemp("jobs"))
    nursery.close()


@pytest.mark.parametrize(
    ("names", "model"),
    [
        (DEGREES, {}),
        (DEGREES, {"sequence_parallel": True} | LLAMA),
        (DEGREES, ONE_KEY),
        (CHUNKS, {}),
        (CHUNKS, LLAMA),
        (("TP 4", "V shape", "unlike replicas"), RECOMPUTED),
        (("TP 4", "V shape", "unlike replicas"), PER_TOKEN | {"num_workers": 2, "check_for_spiky_loss": True}),
        (("TP 4", "V shape", "unlike replicas"), {"bf16": True, "use_distributed_optimizer": True}),
    ],
    ids=[
        "degrees", "degrees, two query groups", "degrees, one query group", "chunks", "chunks, two query groups",
        "recomputed", "per token, loaders", "distributed optimizer",
    ],
)  # fmt: skip
def test_from_plan_to_plan_and_back(jobs: Jobs, tmp_path: Path, names: Sequence[str], model: dict[str, Any]) -> None:
    """Degrees above and below the job's own, and workers with the first and the last chunk."""
    plans = [*(FOUR[name] for name in names), own_plan(4)]
    tolerance = Tolerance(2e-4, 1e-2) if "bf16" in model else FP32
    survive(jobs, tmp_path, plans, workers=4, tolerance=tolerance, train_iters=15, **UNIFORM_LAYOUT | model)


@pytest.mark.parametrize("model", [{}, PER_TOKEN | {"use_distributed_optimizer": True}], ids=["whole", "shared"])
def test_an_interleaved_pipeline_of_the_jobs_own(jobs: Jobs, tmp_path: Path, model: dict[str, Any]) -> None:
    """A worker dies; then the others get other layers, and their own again."""
    words = ask_at(tmp_path, (UNLIKE, 5), (interleaved_plan((0, 3)), 8))
    job = jobs.run(tiny(**INTERLEAVED | model, resihp_inject="kill:2@3:backward", resihp_plan=words), workers=4)
    check_training(job, jobs.reference(tiny(**INTERLEAVED | model), workers=4))
    assert [ParallelPlan.from_dict(each["plan"]).not_uniform is None for each in job.events("epoch_started")] == [
        True, True, False, True,
    ]  # fmt: skip


def test_with_dropout(jobs: Jobs, tmp_path: Path) -> None:
    """With stages of another degree attention has other masks, so losses are only about the same. Holders of a slice
    agree all the same."""
    plans = [FOUR["TP 4"], FOUR["V shape"], own_plan(4)]
    survive(jobs, tmp_path, plans, workers=4, tolerance=MASKED, train_iters=12, **UNIFORM_LAYOUT | DROPOUT)


def test_evaluation(jobs: Jobs, tmp_path: Path) -> None:
    model = MODEL | UNIFORM_LAYOUT | EVALUATION | {"eval_iters": 2, "train_iters": 9}
    files = ask_for(tmp_path, FOUR["TP 4"], FOUR["V shape"], own_plan(4))
    reference = jobs.reference(tiny(**model), workers=4)
    job = jobs.run(tiny(**model, resihp_plan=files), workers=4)
    check_training(job, reference)
    assert len(job.events("epoch_started")) == 4
    assert evaluations(job) == evaluations(reference) and evaluations(job)


@pytest.mark.parametrize("inject", [None, "kill:0@4:evaluate"], ids=["undisturbed", "a death"])
def test_an_evaluation_that_unlike_replicas_share(jobs: Jobs, tmp_path: Path, inject: str | None) -> None:
    model = MODEL | UNIFORM_LAYOUT | EVALUATION | {"eval_iters": 2}
    asked = FOUR["unlike replicas"]
    assert len(asked.replicas) == 2 and all(map(all, (replica.stages for replica in asked.replicas)))
    reference = jobs.reference(tiny(**model), workers=4)
    job = jobs.run(tiny(**model, resihp_plan=ask_at(tmp_path, (asked, 1)), resihp_inject=inject), workers=4)
    check_training(job, reference)
    assert are_heterogeneous(job)[1] and bool(job.summary.deaths) == (inject is not None)
    assert evaluations(job) == evaluations(reference) and evaluations(job)


def test_logs_through_a_kill(jobs: Jobs, tmp_path: Path) -> None:
    """Of the worker that logs, at any moment of an iteration."""
    whole, mended = tmp_path / "whole", tmp_path / "mended"
    reference = jobs.run(tiny(**logged(whole, **PIPELINE)), workers=4)
    job = jobs.start(tiny(**logged(mended, **PIPELINE)), workers=4)
    job.await_event("iteration", iteration=2)
    os.kill(job.worker_pids()[3], signal.SIGKILL)
    check_training(job.wait(), reference)
    assert len(job.summary.deaths) == 1
    check_files(mended, whole, 6)


@pytest.mark.parametrize("model", [{}, PER_TOKEN | {"bf16": True}], ids=["fp32", "bf16, per token"])
def test_a_death_while_unlike_replicas_sum_gradients_in_the_backward_pass(
    jobs: Jobs, tmp_path: Path, model: dict[str, Any]
) -> None:
    model = MODEL | UNIFORM_LAYOUT | {"overlap_grad_reduce": True, "train_iters": 7} | model
    asked = ask_at(tmp_path, (FOUR["unlike replicas"], 2))
    job = jobs.run(tiny(**model, resihp_plan=asked, resihp_inject="kill:0@5:backward"), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4), BF16 if "bf16" in model else FP32)
    assert are_heterogeneous(job)[1] and len(job.summary.deaths) == 1


@pytest.mark.parametrize(
    "model",
    [CLIPPED, TWO | AT_ONCE, TWO | {"dataloader_type": "cyclic", "null_tokenizer_pad_id": 5}],
    ids=["weights clipped by logits", "shared experts", "shuffled samples with padding"],
)
def test_a_death_and_stages_of_another_degree(jobs: Jobs, tmp_path: Path, model: dict[str, Any]) -> None:
    asked = ask_at(tmp_path, (plan(stages([2], [1, 0])), 3))
    job = jobs.run(tiny(**model, resihp_plan=asked, resihp_inject="kill:3@1:backward"), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4))
    assert are_heterogeneous(job)[-1] and len(job.summary.deaths) == 1


def test_a_death_between_batches_that_grow(jobs: Jobs) -> None:
    model = SAMPLES | GROWING
    job = jobs.run(tiny(**model, resihp_inject="kill:3@4:backward"), workers=4)
    losses, undisturbed = job.summary.loss, jobs.reference(tiny(**model), workers=4).summary.loss
    assert job.code == 0 and len(losses) == len(undisturbed) == len(SIZES)
    assert (compare(losses, undisturbed) or 0) < FP32.loss
    assert len(job.events("batch_grown")) == 2 and len(job.summary.deaths) == 1


@pytest.mark.usefixtures("compiled_planner")
@pytest.mark.parametrize("model", [{}, PER_TOKEN, LLAMA], ids=["per micro-batch", "per token", "two query groups"])
def test_a_planner_plans_for_the_survivors_of_a_death(jobs: Jobs, model: dict[str, Any]) -> None:
    """Seven of eight, for whom it wants stages of other degrees than the job's own: where the device's links carry what
    these cost. Through the host that takes so small a model longer than all its work."""
    model = MODEL | UNIFORM_LAYOUT | model
    arguments = tiny(
        **model,
        resihp_strategy="joint",
        resihp_carrier="device",
        resihp_inject="kill:5@6:backward",
        resihp_plan_wait=60,
    )
    job = jobs.start(arguments, workers=8).wait(240.0)
    check_training(job, jobs.reference(tiny(**model), workers=8))
    assert [event["strategy"] for event in job.events("planned")] == ["joint"] and not job.events("plan_failed")
    plan = ParallelPlan.from_dict(job.events("epoch_started")[-1]["plan"])
    assert plan.not_uniform is not None and 5 not in plan.members


def test_uniform_plans_after_a_death_in_a_job_that_counts_tokens(jobs: Jobs) -> None:
    model = MODEL | UNIFORM_LAYOUT | PER_TOKEN | {"train_iters": 9}
    job = jobs.run(tiny(**model, resihp_inject="kill:6@4:grad-sync"), workers=8)
    check_training(job, jobs.reference(tiny(**model), workers=8))


@pytest.mark.parametrize("model", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_death_among_gathered_and_stale_parameters(jobs: Jobs, model: dict[str, Any]) -> None:
    model = MODEL | UNIFORM_LAYOUT | GATHERED | EVALUATION | model
    reference = jobs.reference(tiny(**model), workers=8)
    job = jobs.run(tiny(**model, resihp_inject="kill:6@4:gather"), workers=8)
    tolerance = BF16 if "bf16" in model else FP32
    check_training(job, reference, tolerance)
    assert evaluations(job) == pytest.approx(evaluations(reference), rel=tolerance.loss) and evaluations(job)


@pytest.fixture(scope="module")
def unlike(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    """A checkpoint that unlike replicas have written, and an undisturbed job of the same flags."""
    path = tmp_path_factory.mktemp("unlike")
    saved = save(jobs, path, resihp_plan=ask_for(path, FOUR["unlike replicas"]), **LLAMA)
    assert len(saved.events("epoch_started")) == 2
    return path / "saved", jobs.reference(tiny(**MODEL | UNIFORM_LAYOUT | LLAMA), workers=4)


@pytest.mark.parametrize(
    "layout",
    [{}, {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}],
    ids=["TP 1", "PP 2", "PP 4"],
)
def test_stock_megatron_goes_on_from_what_unlike_replicas_have_saved(
    script: Path, unlike: tuple[Path, Job], layout: dict[str, Any]
) -> None:
    checkpoint, reference = unlike
    workers = layout.get("pipeline_model_parallel_size", 1)
    flags = MODEL | LLAMA | layout | {"make_vocab_size_divisible_by": 256, "load": checkpoint}
    losses = torchrun_losses(script, workers, **flags)
    assert losses == pytest.approx(as_stock_says(rest_of(reference)), rel=FP32.loss)


@pytest.mark.parametrize("optimizer", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_job_goes_on_from_what_survivors_of_node_0_have_saved(
    jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: dict[str, Any]
) -> None:
    """With the flags that a job script gets beside its own, and with checkpoints from then on."""
    model = TWO_NODES | optimizer
    reference = jobs.reference(tiny(**model), workers=4)
    arguments = tiny(**model, resihp_inject="stop:0@6:backward")
    options = {"workers": 2, "nodes": 2, "coordinator": ["127.0.0.1", free_port()]}
    first = jobs.start(arguments, node=0, **options)
    second = late_node(first, tmp_path / "second", arguments, node=1, **options)
    first.await_event("iteration", iteration=5)
    pids = first.worker_pids()
    first.kill()
    for pid in filter(is_alive, (pids[0], pids[1])):
        os.kill(pid, signal.SIGKILL)
    assert second.wait().code == exit_codes.RETRY, second.tails()
    found = newest_state(second.run_dir)
    assert found is not None and found[1] >= 5, second.tails()
    assert " ".join(flags(found[0])) in second.output(), "its launcher says it"
    main(["report", str(second.run_dir)])
    page = capsys.readouterr().out
    assert page.startswith("COORDINATOR LOST") and " ".join(flags(found[0])) in page
    saving = {"save": tmp_path / "saved", "save_interval": 10, "load": tmp_path / "saved"}
    again = jobs.run([*tiny(**model | saving), *flags(found[0])], workers=2)
    assert again.code == 0, again.tails()
    rest = {number: loss for number, loss in reference.summary.loss.items() if number > found[1]}
    assert rest and again.summary.loss == pytest.approx(rest, rel=BF16.loss if optimizer else FP32.loss)
    assert again.events("checkpoint")[-1]["format"] == "torch_dist"


def test_saves_beside_training(script: Path, tmp_path: Path) -> None:
    """Launched as users do: each worker's writer is a process that imports the script anew. One of two workers dies."""
    directory, run_dir = tmp_path / "saved", tmp_path / "run"
    model = {"train_iters": 30, "make_vocab_size_divisible_by": 128}
    saving = ASYNC | {"save": directory, "save_interval": 10}
    launch = [sys.executable, "-m", "megatron_resihp.cli", "launch", "--stand-in", "--nproc-per-node", "2"]
    job = subprocess.run(
        [*launch, "--run-dir", run_dir, script, *tiny(**model, **saving, resihp_inject="kill:1@12:backward")],
        env=environment_of(script), capture_output=True, text=True, timeout=LAUNCHED_S,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    summary = summarize_log(read_events(run_dir / FILE_NAME))
    assert len(summary.recoveries) == 1 and summary.iterations == 30
    assert (directory / "latest_checkpointed_iteration.txt").read_text() == "30"
    # Of other mock data than the launched job's: that they are the right ones, test_async_saves.py shows.
    losses = torchrun_losses(script, 1, **model, load=directory, ckpt_step=20)
    assert sorted(losses) == list(range(21, 31))
    assert losses[25] == pytest.approx(summary.loss[25], rel=1e-2)


@pytest.mark.parametrize("layout", [OPTIMIZER, TENSOR, BOTH], ids=["optimizer", "tensor", "experts, too"])
def test_fewer_workers_share_each_sequence(jobs: Jobs, layout: dict[str, Any]) -> None:
    """The script cuts batches by the arguments and the groups of the plan in force."""
    model = SHARED | layout
    reference = jobs.reference(tiny(**model), workers=4)
    job = jobs.run(tiny(**model, resihp_inject="kill:3@4:backward"), workers=4)
    check_training(job, reference)
    assert [context for context, _ in degrees(job)] == [2, 1]


def test_survivors_that_share_experts_have_unequal_numbers_of_micro_batches(jobs: Jobs) -> None:
    """The script's own forward step and loss run in the rounds that count nothing, too."""
    model = SHARED_BY_FOUR | OPTIMIZER
    job = jobs.run(tiny(**model, resihp_inject="kill:3@3:backward"), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4))
    assert counts(job) == [[2, 2, 2, 2], [3, 3, 2]]


def test_experts_that_died_with_their_only_holder(jobs: Jobs) -> None:
    """Without the distributed optimizer, too, the survivor has a copy of them."""
    job = jobs.run(tiny(**SHARED_EXPERTS, resihp_inject="kill:1@4:backward"), workers=2)
    check_training(job, jobs.reference(tiny(**SHARED_EXPERTS), workers=2))
    assert [event["plan"].get("expert_parallel", 1) for event in job.events("epoch_started")] == [2, 1]


def test_gated_delta_nets_through_a_death_and_in_stages_of_other_degrees(jobs: Jobs, tmp_path: Path) -> None:
    """The script's own builder of models finds which of a stage's layers have them."""
    model = TWO | LINEAR
    words = ask_for(tmp_path, plan(stages([2], [1, 0])), plan(stages([0, 1])))
    job = jobs.run(tiny(**model, resihp_plan=words, resihp_inject="kill:3@1:backward"), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4))
    assert are_heterogeneous(job) == [False, False, True, False]


@pytest.mark.parametrize(
    "model",
    [
        OVERLAPPED | {"bf16": True},
        pytest.param(DEALT, marks=pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason=NO_MUON)),
    ],
    ids=["overlapped experts", "distributed Muon"],
)
def test_a_death_in_what_runs_in_16_bits_only(jobs: Jobs, model: dict[str, Any]) -> None:
    """The script gives Megatron its own schedule of overlapped passes, and its own layout of the optimizer."""
    job = jobs.run(tiny(**model, resihp_inject="kill:3@3:backward"), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4), BF16)
    assert [death.worker for death in job.summary.deaths] == [3]
