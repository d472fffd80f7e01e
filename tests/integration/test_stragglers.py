# SPDX-License-Identifier: Apache-2.0
"""Megatron's own search for stragglers goes on with the ranks of each epoch."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Jobs, ask_for, check_training, tiny
from test_flags import TWO
from test_plan_failures import are_heterogeneous
from test_plans import stages
from test_query_groups import plan

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).with_name("timed_gpt.py")
LISTENS, DOES_NOT = "Controller ready to recv commands on port", "StragglerDetector cannot be controlled"


def searching() -> dict[str, Any]:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    return {"log_straggler": True, "straggler_ctrlr_port": port, "straggler_minmax_count": 1, "logging_level": 20}


def lines(job: Job) -> list[str]:
    return [line for worker in range(job.workers) for line in job.log(worker).splitlines() if "MnRtt/Rnk" in line]


def check_search(job: Job, iterations: int) -> None:
    """Each iteration is logged once, with ranks that there are, and each epoch's first rank takes commands."""
    assert len(lines(job)) == iterations, job.tails()
    assert all(int(rank) < job.workers for line in lines(job) for rank in re.findall(r"ms/(\d+)", line))
    said = "".join(map(job.log, range(job.workers)))
    assert said.count(LISTENS) == len(job.events("epoch_started")) and DOES_NOT not in said


def test_a_death_and_other_degrees(jobs: Jobs, tmp_path: Path) -> None:
    asked = ask_for(tmp_path, plan(stages([2], [1, 0])), plan(stages([0, 1])))
    words = tiny(**TWO, **searching(), resihp_plan=asked, resihp_inject="kill:3@1:backward")
    job = jobs.run(words, workers=4, script=SCRIPT)
    check_training(job, jobs.reference(tiny(**TWO), workers=4))
    assert are_heterogeneous(job) == [False, False, True, False]
    check_search(job, TWO["train_iters"])


@pytest.mark.parametrize("disabled", [False, True], ids=["enabled", "disabled"])
def test_a_step_that_is_logged_again(jobs: Jobs, disabled: bool) -> None:
    """The first rank dies, too, and with it whoever takes commands."""
    model = {"pipeline_model_parallel_size": 2}
    asked = searching() | {"disable_straggler_on_startup": disabled}
    deaths = ["kill:3@3:between", "kill:0@5:backward"]
    job = jobs.run(tiny(**model, **asked, resihp_inject=deaths), workers=4, script=SCRIPT)
    check_training(job, jobs.reference(tiny(**model), workers=4))
    assert len(job.summary.deaths) == 2
    check_search(job, 0 if disabled else 6)
