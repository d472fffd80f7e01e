"""From a verdict to another plan and back: a real worker becomes slow on the emulated clock, and well again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import Job, Jobs, check_training, tiny

from megatron_resihp.cost.profile import BUILT_IN
from megatron_resihp.cost.running import cost_of_job
from megatron_resihp.plan import Chunk, ParallelPlan, spelled_out
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health

WORKERS = 4
SLOW, CLEARED, END = 54, 80, 104
"""Iterations; the first 52 tell the detector what is normal."""
VICTIM, SPEED = 2, 0.5
WITHIN = 20
"""Iterations from a drill to another plan: three until the verdict, some while the plan is made, one to leave."""
TIME_SCALE = 0.06
JOB_S = 180.0


@pytest.mark.usefixtures("compiled_planner")
@pytest.mark.timeout(2 * JOB_S)
def test_a_slow_worker_gets_less_work_and_its_own_back(jobs: Jobs, documents: Path, tmp_path: Path) -> None:
    profile = json.loads((BUILT_IN / "h800.json").read_text())
    (tmp_path / "profile.json").write_text(json.dumps({**profile, "time_scale": TIME_SCALE}))
    model = {
        "global_batch_size": 8, "train_iters": END, "mock_data": False, "data_path": documents, "vocab_size": 257,
        "data_cache_path": documents.with_name("cache"), "dataloader_inter_document_masking": True,
    }  # fmt: skip
    arguments = tiny(
        **model, resihp_emulate=tmp_path / "profile.json", resihp_strategy="joint", resihp_act="act",
        resihp_seconds_between_changes=1.0, resihp_drill=[f"slow:{VICTIM}:{SPEED}@{SLOW}", f"clear@{CLEARED}"],
    )  # fmt: skip
    job = jobs.start(arguments, workers=WORKERS).wait(JOB_S)
    check_training(job, jobs.reference(tiny(**model), workers=WORKERS))

    found = [(event["workers"], event["change"]) for event in job.events("verdict")]
    assert found == [([VICTIM], "onset"), ([VICTIM], "recovery")]
    there, back = job.events("reconfiguration")
    assert SLOW < there["resumed_iteration"] <= SLOW + WITHIN
    assert CLEARED < back["resumed_iteration"] <= CLEARED + WITHIN
    own, other, last = (ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started"))
    assert other.not_rectangular is not None and last.not_rectangular is None
    assert planned_s(job, other, SPEED) < 0.8 * planned_s(job, own, SPEED)
    assert planned_s(job, last, 1.0) == pytest.approx(planned_s(job, own, 1.0))


def planned_s(job: Job, plan: ParallelPlan, speed: float) -> float:
    """Seconds of an iteration's pipelines on the emulated clock, with the victim at this speed."""
    [told], [model] = job.events("job"), job.events("model")
    chunks = tuple(Chunk(*chunk) for chunk in told["chunks"])
    cost = cost_of_job({**told, "arguments": model["arguments"]}, WORKERS, WORKERS, chunks, None)
    health = Health({worker: speed if worker == VICTIM else 1.0 for worker in range(WORKERS)})
    return evaluate(spelled_out(plan, chunks), health, cost).iteration_s
