# SPDX-License-Identifier: Apache-2.0
"""The scale benchmarks speak for all workers or nodes of a job, which have to come through what these tell of."""

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
Record = Callable[[str, object], None]

pytestmark = pytest.mark.nightly


def test_scale_benchmark_brings_a_job_of_ten_thousand_workers_through_a_death(
    run_benchmark: Run, record_property: Record
) -> None:
    result = run_benchmark("coordinator_scale.py")
    assert (result["workers"], result["connections"]) == (10_000, 1_250)
    assert 0 < result["new_plan_s"] < 60 and 0 < result["go_s"] < 60
    record_property("new_plan_10000_s", result["new_plan_s"])


def test_all_nodes_of_such_a_job_join_at_once_and_none_is_lost(run_benchmark: Run, record_property: Record) -> None:
    result = run_benchmark("coordinator_nodes.py", "--seconds", "10")
    assert (result["joined"], result["lost"]) == (1_250, 0)
    assert 0 < result["heartbeat_core_percent"] < 100
    record_property("joined_10000_s", result["join_s"])
    record_property("heartbeats_10000_core_percent", result["heartbeat_core_percent"])
