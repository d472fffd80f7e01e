"""Random deaths, broken epochs and changes of plan, by seed: training stays the same, or the job says why it ends.
With odd seeds the dead come back, if the job lasts long enough; of each four seeds the last two have the distributed
optimizer.

RESIHP_CHAOS=200 runs that many sequences in place of the sample; RESIHP_CHAOS=17-20 just those.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from chaos_plans import ITERATIONS, LAYERS, MICRO_BATCHES, WORKERS, random_sequence
from jobs import Jobs, check_training, tiny
from test_plans import RECTANGLE

MODEL: dict[str, Any] = {
    **RECTANGLE, "num_layers": LAYERS - 2, "global_batch_size": MICRO_BATCHES, "train_iters": ITERATIONS
}  # fmt: skip
SAMPLE = 1
HEARTBEAT_S = 6.0
BOUND_S = 240.0
"""Far beyond what a sequence takes on a busy machine, and below any time-out of torch."""


def seeds() -> range:
    text = os.environ.get("RESIHP_CHAOS", str(SAMPLE))
    first, _, last = text.partition("-")
    return range(int(first), int(last) + 1) if last else range(int(first))


@pytest.mark.parametrize("seed", seeds())
def test_whatever_happens(jobs: Jobs, tmp_path: Path, seed: int) -> None:
    sequence = random_sequence(seed)
    plans = []
    for number, (iteration, plan) in enumerate(sequence.plans):
        file = tmp_path / f"plan{number}.json"
        file.write_text(json.dumps(plan.to_dict()))
        plans.append(f"{file}@{iteration}")
    model = MODEL | {"use_distributed_optimizer": seed % 4 >= 2}
    reference = jobs.reference(tiny(**model), workers=WORKERS)
    job = jobs.start(
        tiny(**model, resihp_plan=plans or None, resihp_drill=list(sequence.drills) or None),
        workers=WORKERS, heartbeat_timeout_s=HEARTBEAT_S, max_restarts=seed % 2,
    ).wait(BOUND_S)  # fmt: skip
    assert not job.events("detection_failed")
    if job.code == 0:
        check_training(job, reference)
        return
    [end] = job.events("run_finished")
    assert job.code == 1 and end["reason"].startswith("no plan fits the survivors"), job.tails()
    assert job.events("worker_dead"), "all state was there, and workers enough"
