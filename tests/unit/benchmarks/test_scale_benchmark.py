# SPDX-License-Identifier: Apache-2.0
"""The scale benchmarks speak for all workers or nodes of a job, which have to come through what these tell of."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.nightly
def test_scale_benchmark_brings_a_job_through_a_death(run_benchmark: Callable[..., dict[str, Any]]) -> None:
    result = run_benchmark("coordinator_scale.py", "--replicas", "2")
    assert (result["workers"], result["connections"]) == (160, 20)
    assert 0 < result["new_plan_s"] < 60 and 0 < result["go_s"] < 60


@pytest.mark.nightly
def test_a_death_among_ten_thousand_workers(
    run_benchmark: Callable[..., dict[str, Any]], record_property: Callable[[str, object], None]
) -> None:
    result = run_benchmark("coordinator_scale.py")
    assert result["workers"] == 10_000
    record_property("new_plan_10000_s", result["new_plan_s"])


@pytest.mark.nightly
def test_all_nodes_join_at_once_and_none_is_lost(run_benchmark: Callable[..., dict[str, Any]]) -> None:
    result = run_benchmark("coordinator_nodes.py", "--nodes", "100", "--seconds", "3")
    assert (result["joined"], result["lost"]) == (100, 0)
    assert 0 < result["heartbeat_core_percent"] < 100
