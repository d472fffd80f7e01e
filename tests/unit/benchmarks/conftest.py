# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' modules are importable as where benchmarks run, and their scripts can be run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(FOLDER))


@pytest.fixture
def run_benchmark() -> Callable[..., dict[str, Any]]:
    """Runs a benchmark with these words; returns its last line."""

    def run(script: str, *words: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(FOLDER / script), *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    return run
