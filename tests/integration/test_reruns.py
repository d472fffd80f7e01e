# SPDX-License-Identifier: Apache-2.0
"""Iterations that Megatron runs again to explain a result, which its own error injection asks for, and deaths in them.

Megatron validates no result of a job's first iteration, so that errors are injected from the second on.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import WISHING, Job, Jobs, ask_for, check_training, tiny
from test_plan_failures import are_heterogeneous
from test_plans import stages
from test_query_groups import plan

pytestmark = pytest.mark.nightly

TWO: dict[str, Any] = {"tensor_model_parallel_size": 2, "global_batch_size": 2, "train_iters": 11}
"""Two members in each of two replicas."""
AGAIN: dict[str, Any] = TWO | {"error_injection_rate": 1, "no_check_for_nan_in_loss_and_grad": True}
"""Only what the wish `doubt` validates can be rejected, and that is not fatal."""
FAILED, DISAMBIGUATE = 17, 16
"""Megatron's exit codes: the result is wrong, and: run the iteration again elsewhere."""


def run_again(job: Job) -> list[int]:
    """The iterations that were, once for each attempt, in the words of the worker that says so most often."""
    found = [re.findall(r"iteration #(\d+): First rerun", job.log(worker)) for worker in range(job.workers)]
    # Megatron counts iterations from one here, and one too many.
    return [int(number) - 1 for number in max(found, key=len)]


@pytest.mark.parametrize("early", [{}, {"overlap_grad_reduce": True}], ids=["", "sums in the pass"])
def test_iterations_that_are_run_again_train_the_same(jobs: Jobs, tmp_path: Path, early: dict[str, Any]) -> None:
    """In the job's own layout, after a death and in unlike stages, also where a standby keeps what one of them has."""
    kept = replace(plan(stages([2], [1])), standbys={0: plan(stages([2], [1])).shards_of(1)})
    words = ask_for(tmp_path, plan(stages([2], [1, 0])), kept, plan(stages([0, 1])))
    model = tiny(**AGAIN | early, resihp_plan=words, resihp_inject="kill:3@1:backward")
    job = jobs.run(model, workers=4, script=WISHING, wishes=["doubt"])
    check_training(job, jobs.reference(tiny(**TWO), workers=4))
    assert are_heterogeneous(job) == [False, False, True, True, False]
    assert sorted(set(run_again(job))) == list(range(2, 12)), job.tails()


@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}])
def test_a_death_while_an_iteration_is_run_again(jobs: Jobs, layout: dict[str, Any]) -> None:
    """The survivors compute it anew, and once more, for another error is injected."""
    job = jobs.run(tiny(**AGAIN | layout), workers=4, script=WISHING, wishes=["doubt", "again-1-4"])
    check_training(job, jobs.reference(tiny(**TWO | layout), workers=4))
    assert [death.worker for death in job.summary.deaths] == [1]
    assert len(job.summary.recoveries) == 1
    assert sorted(set(run_again(job))) == list(range(2, 12)), job.tails()


@pytest.mark.parametrize(
    ("kind", "code", "death"),
    [
        ("transient_error", FAILED, {"resihp_inject": "kill:3@1:backward"}),
        ("persistent_error", DISAMBIGUATE, {"resihp_inject": "kill:3@1:backward"}),
        ("correct_result", DISAMBIGUATE, {}),
    ],
)
def test_an_injected_error_ends_the_job_as_megatron_does(
    jobs: Jobs, tmp_path: Path, kind: str, code: int, death: dict[str, Any]
) -> None:
    """From what it has saved the same job goes on with the diagnosis, and one of other workers with training."""
    saving = {"save": tmp_path, "save_interval": 100, "ckpt_format": "torch_dist"}
    model = TWO | saving | {"error_injection_rate": 1, "error_injection_type": kind}
    job = jobs.run(tiny(**model, **death), workers=4)
    assert {event["error"] for event in job.events("worker_failed")} == {f"exit code {code}"}, job.tails()
    assert job.summary.iterations == 1, "a step with a result that was rejected was taken"
    assert (tmp_path / "latest_checkpointed_iteration.txt").exists() == (code == DISAMBIGUATE)
    if code == FAILED:
        return
    if not death:
        again = jobs.run(tiny(**model, load=tmp_path), workers=4)
        assert "Got rescheduled on the same GPU" in "".join(map(again.log, range(4))), again.tails()
        assert {event["error"] for event in again.events("worker_failed")} == {f"exit code {DISAMBIGUATE}"}
    second = jobs.run(tiny(**TWO, load=tmp_path, ckpt_format="torch_dist"), workers=2 if not death else 4)
    assert second.code == 0, second.tails()
    whole = jobs.reference(tiny(**TWO), workers=4).summary.loss
    assert second.summary.loss == pytest.approx({n: loss for n, loss in whole.items() if n > 1}, rel=1e-5)
