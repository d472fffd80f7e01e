# SPDX-License-Identifier: Apache-2.0
"""Traces: the same by seed, in order, within the session, and nobody is in two spells at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.simulator import traces
from megatron_resihp.simulator.traces import HOUR, Event, What, trace


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def drawn(seed: int) -> traces.Trace:
    random = rng(seed)
    units = traces.nodes(64, 8)
    deaths = traces.moments(traces.weibull(HOUR, 0.7), 24 * HOUR, random)
    slow = traces.moments(traces.poisson(HOUR / 2), 24 * HOUR, random)
    return trace(
        24 * HOUR,
        traces.outages(deaths, units, traces.poisson(3 * HOUR), random),
        traces.slow_downs(slow, traces.single(64), traces.poisson(traces.COMPUTE_SLOW_S), random),
        traces.slow_downs(slow, [(0, 8), (3, 11)], traces.every(traces.LINK_SLOW_S), random, What.LINK),
    )


@given(st.integers(0, 2**32 - 1))
def test_a_trace_is_the_same_by_seed_ordered_and_within_the_session(seed: int) -> None:
    found = drawn(seed)
    assert found == drawn(seed)
    times = [event.at_s for event in found.events]
    assert times == sorted(times) and all(0 <= at < found.duration_s for at in times)


@given(st.integers(0, 2**32 - 1))
def test_nobody_dies_twice_without_rejoining(seed: int) -> None:
    dead: set[int] = set()
    for event in drawn(seed).events:
        if event.what is What.DEATH:
            assert not dead & set(event.workers)
            dead |= set(event.workers)
        elif event.what is What.REJOIN:
            assert dead >= set(event.workers)
            dead -= set(event.workers)


def test_a_node_is_lost_as_a_whole() -> None:
    events = traces.outages([1.0, 2.0], traces.nodes(16, 8), traces.every(HOUR), rng(0))
    lost = [event.workers for event in events if event.what is What.DEATH]
    assert sorted(lost) == [tuple(range(8)), tuple(range(8, 16))]


def test_removals_take_each_worker_once_and_no_more_than_there_are() -> None:
    events = traces.removals([float(at) for at in range(20)], 16, rng(3))
    assert sorted(event.workers[0] for event in events) == list(range(16))


def test_fixed_intervals_begin_after_one() -> None:
    assert traces.moments(traces.every(2.0), 7.0, rng(0)) == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("gaps", [traces.poisson(100.0), traces.weibull(100.0, 0.7), traces.every(100.0)])
def test_gaps_have_the_mean_that_is_asked_for(gaps: traces.Gaps) -> None:
    random = rng(1)
    assert np.mean([gaps(random) for _ in range(20_000)]) == pytest.approx(100, rel=0.05)


def test_failures_by_weibull_come_in_bursts() -> None:
    random = rng(1)
    spread = [np.std([gaps(random) for _ in range(20_000)]) for gaps in (traces.weibull(1.0, 0.7), traces.poisson(1.0))]
    assert spread[0] > 1.2 * spread[1]


@pytest.mark.parametrize(
    ("what", "workers", "speed", "at"),
    [(What.SPEED, (1,), 0.0, 1.0), (What.SPEED, (1,), 1.5, 1.0), (What.LINK, (4, 1), 0.5, 1.0),
     (What.LINK, (1,), 0.5, 1.0), (What.DEATH, (1,), 1.0, -1.0), (What.DEATH, (1,), 1.0, float("nan"))],
)  # fmt: skip
def test_what_cant_happen_is_refused(what: What, workers: tuple[int, ...], speed: float, at: float) -> None:
    with pytest.raises(ValueError, match=r"worker|link|start"):
        Event(at, what, workers, speed)
