# SPDX-License-Identifier: Apache-2.0
"""The scale benchmark speaks for all workers of a job: they have to come through the death that it tells of."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.nightly
def test_scale_benchmark_brings_a_job_through_a_death() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "coordinator_scale.py"), "--replicas", "2"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["workers"], result["connections"]) == (160, 20)
    assert 0 < result["new_plan_s"] < 60 and 0 < result["go_s"] < 60
