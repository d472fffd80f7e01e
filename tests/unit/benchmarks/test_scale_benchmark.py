# SPDX-License-Identifier: Apache-2.0
"""The scale benchmark speaks for all workers of a job: they have to come through the death that it tells of."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.nightly
def test_scale_benchmark_brings_a_job_through_a_death(run_benchmark: Callable[..., dict[str, Any]]) -> None:
    result = run_benchmark("coordinator_scale.py", "--replicas", "2")
    assert (result["workers"], result["connections"]) == (160, 20)
    assert 0 < result["new_plan_s"] < 60 and 0 < result["go_s"] < 60
