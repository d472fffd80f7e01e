# SPDX-License-Identifier: Apache-2.0
"""From a verdict to another plan and back: a real worker becomes slow on the emulated clock, and well again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import Job, Jobs, check_training, tiny

from megatron_resihp.cost.profile import BUILT_IN
from megatron_resihp.cost.running import cost_of_job
from megatron_resihp.detector.inquiry import PAUSE
from megatron_resihp.plan import Chunk, ParallelPlan, spelled_out
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.protocol.planning import KnownJob

WORKERS = 4
SLOW, CLEARED = 54, 80
"""Iterations; the first 52 tell the detector what is normal."""
VICTIM = 2
WITHIN = 20
"""Iterations from what is seen to another plan: three until the verdict, some while the plan is made, one to leave."""
TIME_SCALE = 0.06
JOB_S = 180.0


@pytest.mark.since_megatron("0.19")
@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_planner")
@pytest.mark.timeout(2 * JOB_S)
@pytest.mark.parametrize(
    ("speed", "seen_within"),
    [(0.5, 0), (0.2, PAUSE)],
    ids=["half its speed", "a fifth"],
)
def test_a_slow_worker_gets_less_work_and_its_own_back(
    jobs: Jobs, documents: Path, tmp_path: Path, speed: float, seen_within: int
) -> None:
    """Who has no work shows that it is well only when it is measured, which is done now and then."""
    last = CLEARED + seen_within + 24
    profile = json.loads((BUILT_IN / "h800.json").read_text())
    (tmp_path / "profile.json").write_text(json.dumps({**profile, "time_scale": TIME_SCALE}))
    model = {
        "global_batch_size": 8, "train_iters": last, "mock_data": False, "data_path": documents, "vocab_size": 257,
        "data_cache_path": documents.with_name("cache"), "dataloader_inter_document_masking": True,
    }  # fmt: skip
    arguments = tiny(
        **model, resihp_emulate=tmp_path / "profile.json", resihp_strategy="joint", resihp_act="act",
        resihp_seconds_between_changes=1.0, resihp_inject=[f"slow:{VICTIM}:{speed}@{SLOW}", f"clear@{CLEARED}"],
    )  # fmt: skip
    job = jobs.start(arguments, workers=WORKERS).wait(JOB_S)
    check_training(job, jobs.reference(tiny(**model), workers=WORKERS))

    found = [(event["workers"], event["change"]) for event in job.events("verdict")]
    assert found == [([VICTIM], "onset"), ([VICTIM], "recovery")]
    there, back = job.events("reconfiguration")
    assert SLOW < there["resumed_iteration"] <= SLOW + WITHIN
    assert CLEARED < back["resumed_iteration"] <= CLEARED + seen_within + WITHIN
    own, other, back_again = (ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started"))
    assert other.not_uniform is not None and back_again.not_uniform is None
    assert (VICTIM in other.standbys) == (seen_within > 0)
    assert planned_s(job, other, speed) < 0.8 * planned_s(job, own, speed)
    assert planned_s(job, back_again, 1.0) == pytest.approx(planned_s(job, own, 1.0))


def planned_s(job: Job, plan: ParallelPlan, speed: float) -> float:
    """Seconds of an iteration's pipelines on the emulated clock, with the victim at this speed."""
    [told], [model] = job.events("job"), job.events("model")
    chunks = tuple(Chunk(*chunk) for chunk in told["chunks"])
    known = KnownJob(told["tensor_parallel"], told["micro_batches"], model["arguments"], told["emulated"])
    cost = cost_of_job(known, WORKERS, WORKERS, chunks, None)
    health = Health({worker: speed if worker == VICTIM else 1.0 for worker in range(WORKERS)})
    return evaluate(spelled_out(plan, chunks), health, cost).iteration_s
