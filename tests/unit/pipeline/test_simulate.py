# SPDX-License-Identifier: Apache-2.0
"""The simulator agrees with a slow, obvious calculation on any program, and refuses times that are none."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.pipeline.program import Program
from megatron_resihp.pipeline.schedules import one_f_one_b, zero_bubble_h1
from megatron_resihp.pipeline.simulate import Timeline, makespans, simulate, simulate_many

F, B, W = OpKind


Needs = Callable[[Op, int], list[Op]]
Times = dict[Op, float]
randoms = st.randoms(use_true_random=False)


def reference(program: Program, needs: Needs, durations: np.ndarray, transfers: np.ndarray) -> tuple[Times, Times]:
    """Start and end of each op: times are pushed later until nothing waits for what has not ended."""
    start = {op: 0.0 for ops in program.ops for op in ops}
    while True:
        end = {op: begin + durations[op] for op, begin in start.items()}
        later = dict(start)
        for ops in program.ops:
            for before, op in zip((None, *ops), ops, strict=False):
                ready = [end[before]] if before else []
                for other in needs(op, program.stages):
                    here, there = (program.device_of_stage[o.stage] for o in (op, other))
                    edge = transfers[op.kind, min(op.stage, other.stage), op.micro_batch] if here != there else 0.0
                    ready.append(end[other] + edge)
                later[op] = max([0.0, *ready])
        if later == start:
            return start, end
        start = later


def random_times(program: Program, seed: int, runs: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    durations = generator.exponential(1.0, (runs, 3, program.stages, program.micro_batches))
    durations[generator.random(durations.shape) < 0.2] = 0.0  # stages without layers
    return durations, generator.exponential(0.5, (runs, 2, program.stages - 1, program.micro_batches))


@given(random=randoms, seed=st.integers(0, 2**32))
def test_agrees_with_the_obvious_calculation(draw_program, needs, random, seed):
    program = draw_program(random)
    durations, transfers = random_times(program, seed, 1)
    timeline = simulate(program, durations[0], transfers[0])
    start, end = reference(program, needs, durations[0], transfers[0])
    assert {op: timeline.start[op] for op in start} == start
    assert {op: timeline.end[op] for op in end} == end
    assert timeline.makespan == max(end.values())
    assert np.isfinite(timeline.start).sum() == len(start)
    busy = [sum(durations[0][op] for op in ops) for ops in program.ops]
    np.testing.assert_allclose(timeline.busy, busy)
    np.testing.assert_allclose(timeline.bubble, timeline.makespan - np.array(busy), atol=1e-9)


@given(random=randoms, seed=st.integers(0, 2**32), same_transfers=st.booleans())
def test_many_runs_are_the_single_runs(draw_program, random, seed, same_transfers):
    program = draw_program(random)
    durations, transfers = random_times(program, seed, 3)
    given_transfers = transfers[0] if same_transfers else transfers
    runs = simulate_many(program, durations, given_transfers)
    assert len(runs) == 3
    for run in range(3):
        single = simulate(program, durations[run], transfers[0 if same_transfers else run])
        assert_same(runs[run], single)
    np.testing.assert_array_equal(makespans(program, durations, given_transfers), runs.makespan)


def assert_same(one: Timeline, other: Timeline) -> None:
    np.testing.assert_array_equal(one.start, other.start)
    np.testing.assert_array_equal(one.end, other.end)
    assert one.makespan == other.makespan


def test_a_transfer_delays_who_receives_and_nobody_else():
    timeline = simulate(one_f_one_b(2, 2), np.array([1.0, 2.0, 0.0])[:, None, None], transfers=0.5)
    np.testing.assert_array_equal(timeline.start[F], [[0.0, 1.0], [1.5, 4.5]])
    np.testing.assert_array_equal(timeline.start[B], [[5.0, 8.0], [2.5, 5.5]])
    assert np.isnan(timeline.start[W]).all()
    assert timeline.makespan == 10.0
    assert timeline.bubble_share == pytest.approx(0.4)


def test_transfers_are_given_by_direction_boundary_and_micro_batch():
    transfers = np.zeros((2, 1, 2))
    transfers[B, 0, 1] = 7.0
    timeline = simulate(one_f_one_b(2, 2), 1.0, transfers)
    assert timeline.start[B, 0, 1] == timeline.end[B, 1, 1] + 7.0


@pytest.mark.parametrize(
    ("durations", "transfers", "message"),
    [
        (-1.0, 0.0, "durations must be finite and not negative"),
        (np.nan, 0.0, "durations"),
        (np.inf, 0.0, "durations"),
        (1.0, -1.0, "transfers must be"),
        (1.0, np.nan, "transfers"),
        (np.ones((3, 5, 2)), 0.0, "broadcast"),
        (1.0, np.ones((2, 2, 2)), "broadcast"),
        (1.0, np.ones((4, 2, 1, 2)), "transfers of 4 runs do not fit durations of 1"),
    ],
)
def test_refuses_times_that_are_none(durations, transfers, message):
    with pytest.raises(ValueError, match=message):
        simulate(one_f_one_b(2, 2), durations, transfers)


def test_does_not_look_at_what_the_program_does_not_have():
    durations = np.full((3, 2, 2), np.nan)
    durations[[F, B]] = 1.0
    assert simulate(one_f_one_b(2, 2), durations).makespan == 6.0


def test_a_large_program_takes_milliseconds():
    """The requirement is 5 ms; the bound is generous because others may be using the machine."""
    program = zero_bubble_h1(16, 64)
    durations = np.random.default_rng(0).random((3, 16, 64))
    simulate(program, durations)
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        simulate(program, durations)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.005
