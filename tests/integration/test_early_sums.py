# SPDX-License-Identifier: Apache-2.0
"""Gradients that are summed while the backward pass goes on, where replicas differ: the same bits as after it, also
through a death among the sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Jobs, ask_at, tiny
from test_plan_failures import are_heterogeneous
from test_plans import FOUR, LLAMA, MODEL, PER_TOKEN, UNIFORM_LAYOUT, own_plan

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).with_name("early_sums_gpt.py")
LAYOUT: dict[str, Any] = MODEL | UNIFORM_LAYOUT | {"train_iters": 7}
EARLY: dict[str, Any] = {"overlap_grad_reduce": True}


def bits_of(job: Job) -> tuple[Any, ...]:
    """All that two jobs that do the same have in common, but for digests."""
    assert job.code == 0 and job.summary.completed, job.tails()
    return job.summary.loss, job.summary.grad_norm, [event["plan"] for event in job.events("epoch_started")]


def check_same_digests(one: Job, other: Job) -> None:
    """Those of standbys may be missing at the end: the job doesn't wait for them."""
    digests, others = (
        {(event["iteration"], event["worker"]): event["digests"] for event in job.events("digest")}
        for job in (one, other)
    )
    both = digests.keys() & others.keys()
    assert max(both)[0] == LAYOUT["train_iters"]
    assert {key: digests[key] for key in both} == {key: others[key] for key in both}


@pytest.mark.parametrize(
    "model",
    [
        LLAMA | {"sequence_parallel": True},
        PER_TOKEN | {"bf16": True},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=["llama, sequence parallel", "tied, bf16, per token", "recomputed"],
)
@pytest.mark.parametrize("names", [("unlike replicas",), ("TP 2 and 1 help each other", "a standby keeps its shard")])
def test_the_same_bits_as_after_the_pass(jobs: Jobs, tmp_path: Path, names: tuple[str, ...], model: Any) -> None:
    plans = ask_at(tmp_path, *((FOUR[name], 2 + 2 * number) for number, name in enumerate(names)))
    found = [
        jobs.run(tiny(**LAYOUT | model | early, resihp_plan=plans, resihp_inject="kill:0@6:backward"), workers=4)
        for early in (EARLY, {})
    ]
    early, late = map(bits_of, found)
    assert early == late
    check_same_digests(*found)
    assert all(len(job.summary.deaths) == 1 and sum(are_heterogeneous(job)) > len(names) for job in found)


def test_sums_are_over_before_the_pass_is(jobs: Jobs, tmp_path: Path) -> None:
    """On each worker, in each of its chunks."""
    plans = ask_at(tmp_path, (FOUR["unlike replicas"], 2), (own_plan(4), 5))
    job = jobs.run(tiny(**LAYOUT | EARLY, resihp_plan=plans), workers=4, script=SCRIPT)
    assert job.code == 0 and job.summary.completed, job.tails()
    assert [job.log(worker).count("has ended after a sum") for worker in range(4)] == [3, 3, 3, 3]
