# SPDX-License-Identifier: Apache-2.0
"""Layers split so that the slowest stage is as fast as memory allows."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_instances import job

from megatron_resihp.planner.balance import balanced_chunks


@settings(max_examples=40)
@given(
    speeds=st.lists(st.sampled_from([1.0, 0.7, 0.4]), min_size=1, max_size=4),
    degree=st.sampled_from([1, 2]),
    memory=st.sampled_from([16, 20, 80]),
    layers=st.integers(3, 8),
)
def test_no_other_split_has_a_faster_slowest_stage(speeds: list[float], degree: int, memory: int, layers: int) -> None:
    cost = job(layers=layers, memory=memory * 2**30)
    stages = len(speeds)
    in_flight = range(stages, 0, -1)
    sizes, seconds = cost.bytes(degree, 2), cost.seconds(degree).sum(axis=0)

    def slowest(ends: tuple[int, ...]) -> float:
        worst = 0.0
        for stage, (first, end) in enumerate(zip((0, *ends), (*ends, cost.layers), strict=True)):
            part = slice(first, end)
            used = sizes.state[part].sum() + in_flight[stage] * sizes.kept[part].sum() + sizes.working[part].max()
            if used > cost.device.memory - 8:
                return np.inf
            worst = max(worst, float(seconds[part].sum()) / speeds[stage])
        return worst

    best = min(map(slowest, combinations(range(1, cost.layers), stages - 1)), default=np.inf)
    chunks = balanced_chunks([degree] * stages, speeds, cost, 2, in_flight)
    if chunks is None:
        assert best == np.inf
    else:
        assert slowest(tuple(chunk.first for chunk in chunks[1:])) == pytest.approx(best)


def test_more_stages_than_layers_have_no_split() -> None:
    cost = job(layers=2)
    assert balanced_chunks([1] * 5, [1.0] * 5, cost, 1, [1] * 5) is None
