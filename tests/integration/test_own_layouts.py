# SPDX-License-Identifier: Apache-2.0
"""Jobs whose own layout has a stage with neither embedding nor head, or stages of unlike length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import WISHING, Jobs, ask_at, check_training, tiny
from test_plan_failures import are_heterogeneous
from test_plans import PER_TOKEN, UNTIED, chunks, stages

from megatron_resihp.plan import ParallelPlan, Replica

NIGHTLY = pytest.mark.nightly
MIDDLE: dict[str, Any] = {"pipeline_model_parallel_size": 3, "num_layers": 3, "train_iters": 12}
"""On six workers two replicas; workers 2 and 3 hold the middle stage."""
LAYOUT: dict[str, Any] = {"num_layers": 4, "pipeline_model_parallel_layout": "E|ttt|tL"}
"""The embedding has a stage of its own."""
FIRST: dict[str, Any] = {"num_layers": 5, "decoder_first_pipeline_num_layers": 1}
LAST: dict[str, Any] = {"num_layers": 5, "decoder_last_pipeline_num_layers": 1}
ENDS: dict[str, Any] = {
    "num_layers": 4, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
}  # fmt: skip
OWN = ParallelPlan((Replica(stages([0], [3], [4]), (0, 1, 2, 3)),), {})
"""What can be had of the job's own layout without worker 2."""


def unlike(layers: int) -> ParallelPlan:
    """Worker 3, of the middle stage, has the embedding; and worker 5 has everything. `layers`: with embedding and head
    included."""
    pipeline = Replica(stages([3], [0]), (0, 2), chunks(2, layers))
    return ParallelPlan((pipeline, Replica(stages([5]), (1, 3), chunks(layers))), {})


@NIGHTLY
@pytest.mark.parametrize(
    "layout",
    [LAYOUT, {}, FIRST | PER_TOKEN, LAST, ENDS | UNTIED, LAYOUT | {"use_distributed_optimizer": True}],
    ids=["layout", "even", "first stage", "last stage", "ends count", "distributed optimizer"],
)
def test_a_middle_stage_loses_a_worker_and_another_one_gets_other_layers(
    jobs: Jobs, tmp_path: Path, layout: dict[str, Any]
) -> None:
    model = MIDDLE | layout
    words = ask_at(tmp_path, (unlike(model["num_layers"] + 2), 4), (OWN, 7))
    job = jobs.run(tiny(**model, resihp_plan=words, resihp_inject="kill:2@2:backward"), workers=6)
    check_training(job, jobs.reference(tiny(**model), workers=6))
    assert are_heterogeneous(job) == [False, False, True, False]


@NIGHTLY
@pytest.mark.parametrize("layout", [{}, LAYOUT], ids=["even", "layout"])
def test_who_had_the_middle_stage_dies_under_an_unlike_plan(jobs: Jobs, tmp_path: Path, layout: dict[str, Any]) -> None:
    model = MIDDLE | layout
    words = ask_at(tmp_path, (unlike(model["num_layers"] + 2), 1))
    job = jobs.run(tiny(**model, resihp_plan=words, resihp_inject="kill:3@5:grad-sync"), workers=6)
    check_training(job, jobs.reference(tiny(**model), workers=6))
    assert are_heterogeneous(job) == [False, True, False]


@NIGHTLY
def test_a_worker_of_the_middle_stage_comes_back(jobs: Jobs, tmp_path: Path) -> None:
    """It starts in a world of its own as what its place was, and gets another part under an unlike plan later."""
    model = MIDDLE | LAYOUT | {"train_iters": 14}
    later = ParallelPlan((Replica(stages([9], [0]), (0, 1, 2, 3), chunks(3, model["num_layers"] + 2)),), {})
    arguments = tiny(**model, resihp_plan=ask_at(tmp_path, (later, 10)), resihp_inject="kill:3@2:backward")
    job = jobs.start(arguments, workers=6, max_restarts=1, script=WISHING, wishes=["hold-0-7"])
    job.await_event("worker_waiting", waiting=9, place=3)
    job.wish("go_on")
    check_training(job.wait(), jobs.reference(tiny(**model), workers=6))
    assert are_heterogeneous(job) == [False, False, False, True]
