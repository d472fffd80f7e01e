# SPDX-License-Identifier: Apache-2.0
"""Megatron's own lines of several iterations each are those of an undisturbed job, whatever happens in between."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import EXPERTS, Job, Jobs, ask_at, check_training, tiny
from test_plan_failures import PIPELINE, UNLIKE, VEE

from megatron_resihp.plan import ParallelPlan, Replica

NIGHTLY = pytest.mark.nightly
LONG: dict[str, Any] = PIPELINE | {"log_interval": 3, "train_iters": 9}
"""On four workers two replicas of two stages. Lines are of iterations 1 to 3, 4 to 6 and 7 to 9; and 1 has its own."""
OWN = ParallelPlan(tuple(Replica(((r,), (2 + r,)), tuple(range(r, 4, 2))) for r in range(2)), {})
PRINTED = 1e-5
"""Six digits are."""


def means(job: Job) -> dict[int, list[dict[str, float]]]:
    """For each iteration that has lines the losses in each of them."""
    found: dict[int, list[dict[str, float]]] = {}
    for worker in range(job.workers):
        for line in job.log(worker).splitlines():
            iteration = re.search(r"\] iteration +(\d+)/", line)
            if iteration is not None:
                losses = re.findall(r"\| ([a-z_ ]*loss): (\S+)", line)
                found.setdefault(int(iteration[1]), []).append({name: float(value) for name, value in losses})
    return found


def check_lines(job: Job, reference: Job) -> None:
    check_training(job, reference)
    expected = means(reference)
    assert sorted(expected) == [1, 3, 6, 9] and all("lm loss" in line for [line] in expected.values())
    assert means(job).keys() == expected.keys(), job.tails()
    for iteration, [line] in expected.items():
        for again in means(job)[iteration]:
            assert again == pytest.approx(line, rel=PRINTED), iteration


@pytest.mark.parametrize(
    ("plans", "injections"),
    [
        pytest.param([], ["kill:3@5:backward", "rebuild:0@8:between", "rebuild:0@8:between"], marks=NIGHTLY),
        ([(UNLIKE, 4)], []),
        pytest.param([], ["kill:2@6:step"], marks=NIGHTLY),
        pytest.param([(VEE, 1), (OWN, 4)], ["kill:3@8:backward"], marks=NIGHTLY),
        pytest.param([(UNLIKE, 1)], ["kill:3@5:norm"], marks=NIGHTLY),
    ],
    ids=["death and repetitions", "plan", "death after a step", "plans and a death", "death under a plan"],
)
def test_losses_of_an_interval(
    jobs: Jobs, tmp_path: Path, plans: Sequence[tuple[ParallelPlan, int]], injections: Sequence[str]
) -> None:
    words = ask_at(tmp_path, *plans) or None
    job = jobs.run(tiny(**LONG, resihp_plan=words, resihp_inject=list(injections) or None), workers=4)
    check_lines(job, jobs.reference(tiny(**LONG), workers=4))
    assert len(job.events("epoch_started")) == 1 + len(plans) + len(injections)


@NIGHTLY
def test_losses_that_balance_experts(jobs: Jobs, tmp_path: Path) -> None:
    model = LONG | EXPERTS
    words, injections = ask_at(tmp_path, (VEE, 1)), ["rebuild:0@5:between", "rebuild:1@8:step"]
    job = jobs.run(tiny(**model, resihp_plan=words, resihp_inject=injections), workers=4)
    check_lines(job, jobs.reference(tiny(**model), workers=4))


def test_time_of_an_interval(jobs: Jobs) -> None:
    """A line tells the mean of all its iterations, and not only of those since the last recovery."""
    model = PIPELINE | {"log_interval": 12, "train_iters": 12}
    job = jobs.run(tiny(**model, resihp_inject="rebuild:1@12:backward"), workers=4)
    assert job.code == 0, job.tails()
    [line] = re.findall(r"\] iteration +12/.*elapsed time per iteration \(ms\): ([\d.]+)", job.log(3))
    lasted = [event["duration_s"] for event in job.events("iteration")][1:11]
    assert len(lasted) == 10 and 12 * float(line) / 1000 > 0.9 * sum(lasted)
