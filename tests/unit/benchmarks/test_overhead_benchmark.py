# SPDX-License-Identifier: Apache-2.0
"""The overhead benchmark stands in for Megatron and for a coordinator: it has to keep up with what they ask for."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.nightly
def test_overhead_benchmark_measures_probes_and_coordinator(run_benchmark: Callable[..., dict[str, Any]]) -> None:
    result = run_benchmark("overhead.py", "--replicas", "1")
    assert result["workers"] == 128
    assert 0 < result["probe_us_per_op"] < 1000
    assert result["messages_per_s"] > 100
