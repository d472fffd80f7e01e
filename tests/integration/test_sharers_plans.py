# SPDX-License-Identifier: Apache-2.0
"""Jobs whose replicas share experts plan by speed: for a worker that becomes slow and well again on the emulated clock,
and for one that dies. They train what stock Megatron trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs, check_samples, tiny
from stock_runs import LARGE_JOB_S, check_like_stock, stock_steps
from test_additional_rounds import FOUR, counts
from test_expert_parallelism import OPTIMIZER, SHARED, WORKERS, degrees
from test_loop import CLEARED, SLOW, VICTIM, WITHIN

from megatron_resihp.cost.profile import BUILT_IN
from megatron_resihp.plan import ParallelPlan

pytestmark = pytest.mark.nightly

SPEED = 0.4
TIME_SCALE = 0.12
JOB_S = 360.0
BATCH = 16
"""Micro-batches. On the emulated clock those that share wait for a slow worker between ops, so that it looks the less
slow the fewer there are."""


@pytest.mark.since_megatron("0.19")
@pytest.mark.usefixtures("compiled_planner")
@pytest.mark.timeout(3 * JOB_S)
def test_a_slow_worker_gets_fewer_micro_batches_and_its_own_back(jobs: Jobs, tmp_path: Path) -> None:
    """Of two pairs that share experts, one has the slow worker. It shares them with fewer meanwhile, or with nobody.

    Each token goes to all experts: in so many iterations rounding would lead one of them to another expert.
    """
    profile = json.loads((BUILT_IN / "h800.json").read_text())
    (tmp_path / "profile.json").write_text(json.dumps({**profile, "time_scale": TIME_SCALE}))
    all_experts = {"moe_router_topk": SHARED["num_experts"]}
    layout = SHARED | {"train_iters": CLEARED + 24, "global_batch_size": BATCH} | all_experts
    stock = stock_steps(jobs, WORKERS, **layout)
    arguments = tiny(
        **layout, resihp_emulate=tmp_path / "profile.json", resihp_strategy="joint", resihp_act="act",
        resihp_seconds_between_changes=1.0, resihp_inject=[f"slow:{VICTIM}:{SPEED}@{SLOW}", f"clear@{CLEARED}"],
    )  # fmt: skip
    job = jobs.start(arguments, workers=WORKERS).wait(JOB_S)
    check_like_stock(job, stock)
    check_samples(job)
    there, *_, back = job.events("reconfiguration")
    assert SLOW < there["resumed_iteration"] <= SLOW + WITHIN
    assert CLEARED < back["resumed_iteration"] <= CLEARED + WITHIN
    own, fewer, *_, own_again = map(hands, job.events("epoch_started"))
    assert own == own_again == dict.fromkeys(range(WORKERS), BATCH // WORKERS)
    assert 0 < fewer[VICTIM] < BATCH // WORKERS and sum(fewer.values()) == BATCH


def hands(event: dict[str, Any]) -> dict[int, int]:
    """How many micro-batches each worker has from an epoch's start on."""
    plan = ParallelPlan.from_dict(event["plan"])
    return {worker: len(replica.micro_batches) for replica in plan.replicas for worker, _ in replica.workers()}


@pytest.mark.usefixtures("compiled_planner")
def test_survivors_of_a_death_go_on_by_the_strategys_plan(jobs: Jobs) -> None:
    """The lost worker's experts are made of copies of its part of the optimizer's state."""
    layout = FOUR | OPTIMIZER
    stock = stock_steps(jobs, WORKERS, **layout)
    asked = {"resihp_strategy": "joint", "resihp_plan_wait": 60.0, "resihp_inject": "kill:3@3:backward"}
    job = jobs.start(tiny(**layout, **asked), workers=WORKERS).wait(LARGE_JOB_S)
    check_like_stock(job, stock)
    check_samples(job)
    [planned] = job.events("planned")
    assert planned["strategy"] == "joint" and planned.get("instead_of") is None
    assert degrees(job) == [(4, 4), (3, 3)]
    assert counts(job) == [[2, 2, 2, 2], [3, 3, 2]]
