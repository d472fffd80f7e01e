# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written under any plan: a job of another layout goes on from them, with this package or without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import BF16, EXPERTS, FP32, LINEAR, PRETRAIN, Job, Jobs, Tolerance, tiny
from stock_runs import stock_losses
from test_plans import FOUR, LLAMA, MODEL, PREDICTIONS, UNIFORM_LAYOUT
from torch.distributed import checkpoint as checkpoints
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_resihp.control import exit_codes
from megatron_resihp.integration.emergency.contents import found_groups

SAVED = 6
"""Halfway, four iterations after the change of plan."""
LATER = 10
FUSED = Path(__file__).with_name("fused_gpt.py")
"""Megatron loads a distributed optimizer's checkpoint only if that counts steps as this script's does."""
SHARED: dict[str, Any] = {"use_distributed_optimizer": True}


NIGHTLY = pytest.mark.nightly


def change_to(name: str, path: Path, iteration: int) -> dict[str, Any]:
    file = path / "plan.json"
    file.write_text(json.dumps(FOUR[name].to_dict()))
    return {"resihp_plan": f"{file}@{iteration}"}


def rest_of(reference: Job) -> dict[int, float]:
    """The losses of the iterations that a job has left that goes on from the checkpoint."""
    return {n: loss for n, loss in reference.summary.loss.items() if n > SAVED}


def save(jobs: Jobs, path: Path, **options: Any) -> Job:
    """A job that saves under the plan in force halfway, and ends."""
    saving = {"save": path / "saved", "save_interval": SAVED, "exit_interval": SAVED}
    job = jobs.run(tiny(**MODEL | UNIFORM_LAYOUT | saving | options), workers=4)
    assert job.code == 0, job.tails()
    assert (path / "saved" / "latest_checkpointed_iteration.txt").read_text() == str(SAVED)
    return job


@pytest.mark.parametrize(
    ("name", "model", "tolerance"),
    [
        pytest.param("TP 2 and 1", {}, FP32, marks=NIGHTLY),
        pytest.param("V shape", {}, FP32, marks=NIGHTLY),
        pytest.param("unlike replicas", LLAMA | {"bf16": True}, BF16, marks=NIGHTLY),
        pytest.param("four stages", LLAMA, FP32, marks=NIGHTLY),
        pytest.param("V shape", LLAMA | {"bf16": True}, BF16, marks=NIGHTLY),
        pytest.param("TP 2 and 1", EXPERTS | {"sequence_parallel": True}, FP32, marks=NIGHTLY),
        pytest.param("TP 2 and 1", PREDICTIONS, FP32, marks=NIGHTLY),
        pytest.param("TP 2 and 1", LINEAR, FP32, marks=NIGHTLY),
    ],
    ids=[
        "unlike stages",
        "V shape",
        "unlike replicas",
        "four stages",
        "V shape in 16 bits",
        "experts",
        "further predictions",
        "gated delta nets",
    ],
)
def test_a_job_goes_on_in_its_own_layout(
    jobs: Jobs, tmp_path: Path, name: str, model: dict[str, Any], tolerance: Tolerance
) -> None:
    older = {"ckpt_format": "torch"} if name == "V shape" else {}
    saved = save(jobs, tmp_path, **model, **older, **change_to(name, tmp_path, 2))
    assert len(saved.events("epoch_started")) == 2, saved.tails()
    assert [event["format"] for event in saved.events("checkpoint")] == ["torch_dist"]
    layout = MODEL | UNIFORM_LAYOUT | model
    job = jobs.run(tiny(**layout, load=tmp_path / "saved"), workers=4)
    assert job.code == 0, job.tails()
    assert job.summary.loss == pytest.approx(rest_of(jobs.reference(tiny(**layout), workers=4)), rel=tolerance.loss)


@NIGHTLY
def test_a_job_changes_its_plan_after_loading(jobs: Jobs, tmp_path: Path) -> None:
    """From a checkpoint of its own layout."""
    save(jobs, tmp_path)
    going_on = MODEL | UNIFORM_LAYOUT | {"load": tmp_path / "saved"}
    job = jobs.run(tiny(**going_on, **change_to("unlike replicas", tmp_path, SAVED + 2)), workers=4)
    assert job.code == 0, job.tails()
    assert len(job.events("epoch_started")) == 2, job.tails()
    reference = jobs.reference(tiny(**MODEL | UNIFORM_LAYOUT), workers=4)
    assert job.summary.loss == pytest.approx(rest_of(reference), rel=1e-5)


@pytest.mark.nightly
def test_stock_megatron_goes_on_in_another_layout(jobs: Jobs, tmp_path: Path) -> None:
    """With one stage and one tensor-parallel member."""
    reference = jobs.reference(tiny(**MODEL | UNIFORM_LAYOUT), workers=4)
    save(jobs, tmp_path, **change_to("TP 2 and 1", tmp_path, 2))
    # Padded entries of the vocabulary take part in the loss, and Megatron pads to a multiple of TP times this.
    losses = stock_losses(jobs, PRETRAIN, 1, **MODEL, make_vocab_size_divisible_by=256, load=tmp_path / "saved")
    assert losses == pytest.approx(as_stock_says(rest_of(reference)), rel=1e-5)


def as_stock_says(losses: dict[int, float]) -> dict[int, float]:
    """Megatron does not clear its totals after the first line, so the second one is the mean of both."""
    first, second, *_ = sorted(losses)
    return losses | {second: (losses[first] + losses[second]) / 2}


@pytest.mark.nightly
def test_a_distributed_optimizer_goes_on_in_another_layout(jobs: Jobs, tmp_path: Path) -> None:
    """Unlike stages to two replicas of one tensor-parallel member."""
    reference = jobs.reference(tiny(**MODEL | UNIFORM_LAYOUT), workers=4)
    save(jobs, tmp_path, **SHARED, **change_to("TP 2 and 1", tmp_path, 2))
    other = {"pipeline_model_parallel_size": 2, "make_vocab_size_divisible_by": 256, "exit_interval": SAVED + 3}
    job = jobs.run(tiny(**MODEL | SHARED | other, load=tmp_path / "saved"), workers=4, script=FUSED)
    assert job.code == 0, job.tails()
    assert sorted(job.summary.loss) == [SAVED + 1, SAVED + 2, SAVED + 3]
    assert job.summary.loss == pytest.approx({n: reference.summary.loss[n] for n in job.summary.loss}, rel=1e-5)


@NIGHTLY
@pytest.mark.parametrize(
    ("name", "model", "tolerance"),
    [
        ("unlike replicas", {}, FP32),
        ("unlike replicas", LLAMA | {"bf16": True}, BF16),
        ("V shape", {"bf16": True}, BF16),
        ("TP 2 and 1", EXPERTS | {"sequence_parallel": True}, FP32),
        ("TP 2 and 1", {"fp16": True, "accumulate_allreduce_grads_in_fp32": True, "initial_loss_scale": 1024}, BF16),
    ],
    ids=["tied", "untied in 16 bits", "V shape in 16 bits", "experts", "half precision"],
)
def test_with_a_distributed_optimizer_and_without_it(
    jobs: Jobs, tmp_path: Path, name: str, model: dict[str, Any], tolerance: Tolerance
) -> None:
    """Both load what a job with it saves under an unlike plan: Megatron in another layout, a job in its own."""
    expected = rest_of(jobs.reference(tiny(**MODEL | UNIFORM_LAYOUT | model), workers=4))
    save(jobs, tmp_path, **model, **SHARED, **change_to(name, tmp_path, 2))
    model = MODEL | model | {"load": tmp_path / "saved"}
    other = SHARED | {"tensor_model_parallel_size": 1, "sequence_parallel": False, "make_vocab_size_divisible_by": 256}
    losses = stock_losses(jobs, FUSED, 2, **model | other)
    assert losses == pytest.approx(as_stock_says(expected), rel=tolerance.loss)
    job = jobs.run(tiny(**model | UNIFORM_LAYOUT), workers=4)
    assert job.code == 0, job.tails()
    assert job.summary.loss == pytest.approx(expected, rel=tolerance.loss)


@NIGHTLY
@pytest.mark.parametrize(
    ("model", "rel"),
    [(LLAMA, 1e-5), ({"bf16": True, "disable_bias_linear": True}, 2e-2)],
    ids=["32 bits", "tied, 16 bits"],
)
def test_masters_and_moments_are_those_that_megatron_s_distributed_optimizer_saves(
    jobs: Jobs, tmp_path: Path, model: dict[str, Any], rel: float
) -> None:
    """Of models without biases: those of attention's keys have no gradient but rounding's, which Adam makes large.

    Seen are 1.3e-7, and 5e-3 in 16 bits.
    """
    unlike, uniform = tmp_path / "unlike", tmp_path / "uniform plan"
    for path in (unlike, uniform):
        path.mkdir()
    save(jobs, unlike, **model, **SHARED, **change_to("unlike replicas", unlike, 2))
    save(jobs, uniform, **model, **SHARED, dist_ckpt_optim_fully_reshardable=True)
    found, expected = (optimizer_tensors(path / "saved" / f"iter_{SAVED:07d}") for path in (unlike, uniform))
    kinds = {"param", "exp_avg", "exp_avg_sq"}
    assert {key.split(".")[2] for key in expected} == kinds
    assert {key for key in found if key.split(".")[2] in kinds} == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert float((found[key] - tensor).norm()) <= rel * float(tensor.norm()), key
        other = key.replace(".param.", ".fp32_param.")
        assert "bf16" not in model or torch.equal(found[key], found[other]), key


def optimizer_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of the optimizer's state, put together."""
    reader = checkpoints.FileSystemReader(checkpoint)
    described = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in described.items()
        if key.startswith("optimizer.") and isinstance(each, TensorStorageMetadata)
    }
    checkpoints.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@NIGHTLY
@pytest.mark.parametrize(
    ("model", "reshardable", "tolerance"),
    [({"bf16": True}, False, BF16), ({}, True, FP32)],
    ids=["by DP only", "in any layout"],
)
def test_a_distributed_optimizer_s_checkpoint_is_loaded_and_saved_under_an_unlike_plan(
    jobs: Jobs, tmp_path: Path, model: dict[str, Any], reshardable: bool, tolerance: Tolerance
) -> None:
    """Of each of Megatron's formats, and Megatron loads it again; the first, its default, it loads in 16 bits only."""
    layout = MODEL | UNIFORM_LAYOUT | model
    expected = rest_of(jobs.reference(tiny(**layout), workers=4))
    layout |= SHARED | {"dist_ckpt_optim_fully_reshardable": reshardable}
    save(jobs, tmp_path, **layout)
    later = {"save": tmp_path / "later", "save_interval": LATER, "exit_interval": LATER}
    loading = layout | later | {"load": tmp_path / "saved"} | change_to("unlike replicas", tmp_path, SAVED + 2)
    job = jobs.run(tiny(**loading), workers=4, script=FUSED)
    assert job.code == 0, job.tails()
    assert len(job.events("epoch_started")) == 2, job.tails()
    until = {n: loss for n, loss in expected.items() if n <= LATER}
    assert job.summary.loss == pytest.approx(until, rel=tolerance.loss)
    losses = stock_losses(jobs, FUSED, 4, **layout | {"load": tmp_path / "later"})
    rest = {n: loss for n, loss in expected.items() if n > LATER}
    assert losses == pytest.approx(as_stock_says(rest), rel=tolerance.loss)


def test_survivors_of_a_plan_that_lost_state_name_it(jobs: Jobs, tmp_path: Path) -> None:
    """Worker 2 was the only one with its half of the last layer and of the head."""
    plan = change_to("other layers", tmp_path, 2)
    job = jobs.run(tiny(**MODEL | UNIFORM_LAYOUT | plan, resihp_inject="kill:2@5:backward"), workers=4)
    assert job.code == exit_codes.NO_PLAN, job.tails()
    assert {each.complete for each in job.summary.salvages} == {False}
    [group] = found_groups(job.run_dir)
    assert group.iteration == 4 and {each.worker for each in group.files.values()} == {0, 1, 3}
    assert group.gaps == ("layers 4–5 TP rank 0 of 2",)


@NIGHTLY
@pytest.mark.parametrize(("loading", "script"), [(SHARED, FUSED), ({}, PRETRAIN)], ids=["with it", "without it"])
def test_a_distributed_optimizer_is_saved_once_it_has_taken_a_step(
    jobs: Jobs, tmp_path: Path, loading: dict[str, Any], script: Path
) -> None:
    """The first loss scales are too large in 16 bits. The save that is due meanwhile follows the first step."""
    half = {"fp16": True, "accumulate_allreduce_grads_in_fp32": True, "initial_loss_scale": 2**26, "hysteresis": 1}
    layout = MODEL | UNIFORM_LAYOUT | half
    reference = jobs.reference(tiny(**layout), workers=4)
    first = len(reference.summary.skipped_iterations) + 1
    saving = {"save": tmp_path / "saved", "save_interval": SAVED, "exit_interval": LATER}
    job = jobs.run(tiny(**layout | SHARED | saving | change_to("TP 2 and 1", tmp_path, 2)), workers=4)
    assert job.code == 0, job.tails()
    assert SAVED < first < LATER and [event["iteration"] for event in job.events("checkpoint")] == [first, LATER]
    assert any(f"does not save iteration {SAVED}" in job.log(worker) for worker in range(4))
    job = jobs.run(tiny(**layout | loading, load=tmp_path / "saved", ckpt_step=first), workers=4, script=script)
    assert job.code == 0, job.tails()
    rest = {n: loss for n, loss in reference.summary.loss.items() if n > first}
    assert job.summary.loss == pytest.approx(rest, rel=BF16.loss)
