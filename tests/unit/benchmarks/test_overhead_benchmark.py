# SPDX-License-Identifier: Apache-2.0
"""The overhead benchmark stands in for Megatron and for a coordinator: it has to keep up with what they ask for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.nightly
def test_overhead_benchmark_measures_probes_and_coordinator() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "overhead.py"), "--replicas", "1"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["workers"] == 128
    assert 0 < result["probe_us_per_op"] < 1000
    assert result["messages_per_s"] > 100
