"""Checkpoints written under any plan: a job of another layout goes on from them, with this package or without it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import BF16, EXPERTS, FP32, MOCK_DATA_SIZE, NURSERY_ENVIRONMENT, PRETRAIN, Job, Jobs, Tolerance, tiny
from test_plans import FOUR, LLAMA, MODEL, RECTANGLE

SAVED = 6
"""Halfway, four iterations after the change of plan."""
STOCK_S = 200.0
STOCK = f"""
import megatron_resihp, runpy
megatron_resihp.enable()
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
MockGPTLowLevelDataset.size = {MOCK_DATA_SIZE}
runpy.run_path({str(PRETRAIN)!r}, run_name="__main__")
"""
"""Megatron itself on the data of the other jobs."""


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
    job = jobs.run(tiny(**MODEL | RECTANGLE | saving | options), workers=4)
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
    ],
    ids=["unlike stages", "V shape", "unlike replicas", "four stages", "V shape in 16 bits", "experts"],
)
def test_a_job_goes_on_in_its_own_layout(
    jobs: Jobs, tmp_path: Path, name: str, model: dict[str, Any], tolerance: Tolerance
) -> None:
    older = {"ckpt_format": "torch"} if name == "V shape" else {}
    saved = save(jobs, tmp_path, **model, **older, **change_to(name, tmp_path, 2))
    assert len(saved.events("epoch_started")) == 2, saved.tails()
    assert [event["format"] for event in saved.events("checkpoint")] == ["torch_dist"]
    layout = MODEL | RECTANGLE | model
    job = jobs.run(tiny(**layout, load=tmp_path / "saved"), workers=4)
    assert job.code == 0, job.tails()
    assert job.summary.loss == pytest.approx(rest_of(jobs.reference(tiny(**layout), workers=4)), rel=tolerance.loss)


@NIGHTLY
def test_a_job_changes_its_plan_after_loading(jobs: Jobs, tmp_path: Path) -> None:
    """From a checkpoint of its own layout."""
    save(jobs, tmp_path)
    going_on = MODEL | RECTANGLE | {"load": tmp_path / "saved"}
    job = jobs.run(tiny(**going_on, **change_to("unlike replicas", tmp_path, SAVED + 2)), workers=4)
    assert job.code == 0, job.tails()
    assert len(job.events("epoch_started")) == 2, job.tails()
    reference = jobs.reference(tiny(**MODEL | RECTANGLE), workers=4)
    assert job.summary.loss == pytest.approx(rest_of(reference), rel=1e-5)


def test_stock_megatron_goes_on_in_another_layout(jobs: Jobs, tmp_path: Path) -> None:
    """Under torchrun, without this package's flags, one stage and one tensor-parallel member."""
    reference = jobs.reference(tiny(**MODEL | RECTANGLE), workers=4)
    save(jobs, tmp_path, **change_to("TP 2 and 1", tmp_path, 2))
    ours = {"resihp": False, "resihp_record_samples": False, "resihp_record_digests": False}
    # Padded entries of the vocabulary take part in the loss, and Megatron pads to a multiple of TP times this.
    vocabulary = {"make_vocab_size_divisible_by": 256}
    log = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python",
         sys.executable, "-c", STOCK, *tiny(**MODEL | ours | vocabulary, load=tmp_path / "saved")],
        env=os.environ | NURSERY_ENVIRONMENT, capture_output=True, text=True, timeout=STOCK_S,
    )  # fmt: skip
    assert log.returncode == 0, log.stdout[-3000:] + log.stderr[-3000:]
    lines = re.findall(r"iteration +(\d+)/.* lm loss: (\S+) ", log.stdout)
    expected = rest_of(reference)
    # Megatron does not clear its totals after the first line, so the second one is the mean of both.
    expected[SAVED + 2] = (expected[SAVED + 1] + expected[SAVED + 2]) / 2
    assert {int(n): float(loss) for n, loss in lines} == pytest.approx(expected, rel=1e-5)


def test_survivors_of_a_plan_that_lost_state_write_slices(jobs: Jobs, tmp_path: Path) -> None:
    """Worker 2 was the only one with its half of the last layer and of the head."""
    plan = change_to("other layers", tmp_path, 2)
    job = jobs.run(tiny(**MODEL | RECTANGLE | plan, resihp_drill="kill:2@5:backward"), workers=4)
    assert job.code == 1, job.tails()
    assert {salvage.complete for salvage in job.summary.salvages} == {False}
    contents = [json.loads(path.read_text()) for path in job.run_dir.glob("salvage/iter_0000004/worker_*.json")]
    pieces = {piece for each in contents for piece in each["slices"]}
    assert {each["cuts"] for each in contents} == {2}
    assert {"1/0", "1/1", "3/0", "3/1", "4/1"} <= pieces and not {"4/0", "5/0"} & pieces
    assert all((job.run_dir / "salvage" / "iter_0000004" / f"worker_{worker}.pt").is_file() for worker in (0, 1, 3))
