# SPDX-License-Identifier: Apache-2.0
"""A resumed job starts its detector from the cost model that an earlier run has saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Jobs, tiny

from megatron_resihp.detector.judging.learned import load

LEARNED, AGAIN = 60, 15


@pytest.mark.nightly
def test_a_job_saves_its_costs_and_another_starts_from_them(jobs: Jobs, tmp_path: Path) -> None:
    first = jobs.start(tiny(train_iters=LEARNED), workers=2).wait()
    assert first.code == 0, first.tails()
    path = first.run_dir / "cost_model.json"
    model = load(path).model
    assert model.iteration_mape > 0 and model.terms["optimizer"] > 0

    second = jobs.start(tiny(train_iters=AGAIN, resihp_cost_model=path), workers=2).wait()
    assert second.code == 0, second.tails()
    (told,) = second.events("detection_resumed")
    assert told["path"] == str(path) and told["iteration"] < AGAIN

    cut = tmp_path / "cut.json"
    cut.write_text(path.read_text()[:1000])
    refused = jobs.start(tiny(train_iters=AGAIN, resihp_cost_model=cut), workers=2).wait()
    assert refused.code and f"--resihp-cost-model {cut} is not JSON" in refused.tails()
