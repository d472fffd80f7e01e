# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle data: samples are cut at random places, which follow from the sample and not from who reads it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import REPOSITORY, Jobs, ask_for, check_training, tiny
from test_plan_failures import are_heterogeneous
from test_plans import stages
from test_query_groups import plan

from megatron_resihp.report.run.summary import compare

sys.path.append(str(REPOSITORY / "benchmarks"))

from recipe_runs.filling import END, write_documents
from recipe_runs.runs import SCRIPT

FILLING: dict[str, Any] = {
    "tensor_model_parallel_size": 2, "global_batch_size": 2, "train_iters": 11, "mock_data": None,
    "vocab_size": END + 1, "fim_data": True, "fim_rate": 0.7, "fim_spm_rate": 0.5,
}  # fmt: skip
"""Two members in each of two replicas."""


@pytest.mark.nightly
def test_samples_are_cut_the_same_after_a_death(jobs: Jobs, tmp_path: Path) -> None:
    """A replica dies, and the others read what it would have read: in one process more or less, in another order."""
    write_documents(tmp_path / "documents")
    model = FILLING | {"data_path": tmp_path / "documents"}
    undisturbed = jobs.run(tiny(**model), workers=4, script=SCRIPT)
    words = ask_for(tmp_path, plan(stages([2], [1, 0])), plan(stages([0, 1])))
    death = {"resihp_plan": words, "resihp_inject": "kill:3@1:backward", "num_workers": 1}
    job = jobs.run(tiny(**model | death), workers=4, script=SCRIPT)
    check_training(job, undisturbed)
    assert are_heterogeneous(job) == [False, False, True, False]
    # The control: samples that are not cut train something else.
    whole = jobs.run(tiny(**model | {"fim_rate": 1e-9}), workers=4, script=SCRIPT)
    assert (compare(whole.summary.loss, undisturbed.summary.loss) or 0) > 1e-3
