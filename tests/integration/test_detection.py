# SPDX-License-Identifier: Apache-2.0
"""Eight real workers on the emulated clock, with packed documents: what is slow is named, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Jobs, tiny

from megatron_resihp.cost.profile import BUILT_IN

WARM_UP = 50
SLOW, SLOW_CLEARED = 60, 75
LINK, LINK_CLEARED = 85, 100
HEALTHY = 200
"""Iterations that are judged and that no fault injection touches."""

ETHERNET = 1.25e9
"""Bytes per second of a network on which a transfer takes 32 ms of the emulated clock: next to that the moments between
the clock's last look and the record's are nothing."""
TIME_SCALE = 0.15
"""Seconds of the emulated clock per second of the device: two cores do the real work of most ops in less."""
JOB_S = 480.0
"""It takes two to three minutes."""


@pytest.mark.nightly
@pytest.mark.since_megatron("0.19")
@pytest.mark.usefixtures("compiled_planner")
@pytest.mark.timeout(JOB_S + 120)
def test_a_slow_worker_and_a_slow_link_are_named_and_nothing_else_is(
    jobs: Jobs, documents: Path, tmp_path: Path
) -> None:
    end = WARM_UP + HEALTHY + (SLOW_CLEARED - SLOW) + (LINK_CLEARED - LINK)
    profile = json.loads((BUILT_IN / "h800.json").read_text())
    profile["time_scale"] = TIME_SCALE
    profile["links"]["between_nodes"]["bytes_per_s"] = ETHERNET
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    arguments = tiny(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, global_batch_size=4, train_iters=end,
        seq_length=64, max_position_embeddings=64, mock_data=False, data_path=documents, vocab_size=257,
        data_cache_path=documents.with_name("cache"), dataloader_inter_document_masking=True,
        resihp_emulate=tmp_path / "profile.json",
        resihp_inject=[
            f"slow:5:0.8@{SLOW}", f"clear@{SLOW_CLEARED}", f"link:1-5:0.3@{LINK}", f"clear@{LINK_CLEARED}",
        ],
    )  # fmt: skip
    job = jobs.start(arguments, workers=8).wait(JOB_S)
    assert job.code == 0, job.tails()
    assert job.summary.completed and job.events("detection")[-1]["warm"]

    worker_found, worker_back = verdicts(job, "compute", [5])
    assert worker_found["iteration"] <= SLOW + 5 and worker_found["speed"] == pytest.approx(0.8, abs=0.03)
    assert SLOW_CLEARED <= worker_back["iteration"] <= SLOW_CLEARED + 10
    link_found, link_back = verdicts(job, "link", [1, 5])
    assert link_found["speed"] == pytest.approx(0.3, abs=0.1)
    assert LINK <= link_found["iteration"] < LINK_CLEARED <= link_back["iteration"]
    others = [event for event in job.events("verdict") if event["workers"] not in ([5], [1, 5])]
    assert not others, json.dumps(others)


def verdicts(job: Job, kind: str, workers: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The one onset and the one recovery of what a fault injection slowed."""
    found = [event for event in job.events("verdict") if event["workers"] == workers]
    onsets, recoveries = ([event for event in found if event["change"] == change] for change in ("onset", "recovery"))
    assert {event["kind"] for event in found} == {kind} and len(onsets) == len(recoveries) == 1, found
    return onsets[0], recoveries[0]
