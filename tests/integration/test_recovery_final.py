# SPDX-License-Identifier: Apache-2.0
"""Workers die after the last iteration, in what pretrain() does then: the job still ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Jobs, check_training, tiny

PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
"""Two replicas of two stages: workers 0 and 1 are the first stage of replica 0 and 1, 2 and 3 the second."""
AFTER_TRAINING = 7
"""The tiny job has 6 iterations."""


def options(checkpoint: Path) -> dict[str, Any]:
    """One evaluation and one checkpoint within training; another checkpoint and two evaluations after it."""
    return {
        **PIPELINE, "eval_interval": 4, "eval_iters": 1, "ckpt_format": "torch", "save": checkpoint,
        "save_interval": 4,
    }  # fmt: skip


def evaluations(job: Job) -> dict[str, float]:
    """Losses that Megatron's log says of validation and test set, by what they are of; all workers say the same."""
    found: dict[str, set[float]] = {}
    for worker in range(job.workers):
        for line in job.log(worker).splitlines():
            if "validation loss at " in line:
                name = line.split("validation loss at ")[1].split("|")[0].strip()
                found.setdefault(name, set()).add(round(float(line.split("lm loss value: ")[1].split()[0]), 5))
    assert all(len(losses) == 1 for losses in found.values()), found
    return {name: losses.pop() for name, losses in found.items()}


@pytest.mark.parametrize(
    "injections",
    [
        [f"kill:1@{AFTER_TRAINING}:save"],
        [f"kill:2@{AFTER_TRAINING}:save"],
        [f"kill:0@{AFTER_TRAINING}:evaluate"],
        [f"kill:3@{AFTER_TRAINING}:evaluate"],
        # Worker 3, a standby after the first death, is the only holder of its stage after the second.
        [f"kill:1@{AFTER_TRAINING}:save", f"kill:2@{AFTER_TRAINING}:evaluate"],
        ["kill:1@3:backward", f"kill:2@{AFTER_TRAINING}:evaluate"],
    ],
    ids=lambda injections: " then ".join(injections),
)
def test_a_death_after_the_last_iteration(jobs: Jobs, injections: list[str], tmp_path: Path) -> None:
    reference = jobs.reference(tiny(**options(jobs.directory / "final")), workers=4)
    job = jobs.run(tiny(**options(tmp_path), resihp_inject=injections), workers=4)
    check_training(job, reference)
    assert len(job.summary.deaths) == len(job.summary.recoveries) == len(injections)
    assert len(evaluations(reference)) == 3
    assert evaluations(job) == evaluations(reference)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"
    shards = sorted(path.parent.name for path in tmp_path.glob("iter_0000006/*/*.pt"))
    assert shards == ["mp_rank_00_000", "mp_rank_00_001"]
