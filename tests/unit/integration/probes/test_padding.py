# SPDX-License-Identifier: Apache-2.0
"""Padding ops and transfers to an emulated device's time, on a clock that the tests turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.control.slowness import Slowness
from megatron_resihp.cost.profile import DeviceProfile, LayerKind, LinkCost, PassCost
from megatron_resihp.detector.input.records import OpKind
from megatron_resihp.integration.probes.padding import SLICE_S, Padding

COSTS = [(PassCost(0.001, 1e-5, 0.002), PassCost(0.003), PassCost(0.001))]


class FakeTime:
    """A clock that moves when it is slept on, and by a microsecond when it is looked at."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def padding(
    time: FakeTime,
    slowness: Slowness | None = None,
    noise: float = 0.0,
    interrupted: Callable[[], bool] = lambda: False,
    exchanged: Callable[[OpKind, int], float] = lambda kind, chunk: 0.0,
) -> Padding:
    """Worker 1's: a real token stands for 10 and has 8 bytes; nodes of 2 workers; 0.01 s + tokens / 1000 to node 1."""
    profile = DeviceProfile(
        device="test",
        passes={kind: COSTS[0] for kind in LayerKind},
        tensor_parallel=1,
        sequence=1000,
        time_scale=1.0,
        workers_per_node=2,
        within_node=LinkCost(0.0, math.inf),
        between_nodes=LinkCost(0.01, 16_000.0),
        boundary_bytes_per_token=16.0,
        noise=noise,
        seed=7,
    )
    held = slowness or Slowness()
    return Padding(
        profile, 1, lambda: COSTS, 10.0, 8.0, lambda: held, interrupted, exchanged, time.clock, time.sleep
    )  # fmt: skip


def lasted(time: FakeTime, pad: Callable[[float], None]) -> float:
    """How long an op or transfer lasts that really takes 3 ms."""
    started = time.now
    time.now += 0.003
    pad(started)
    return time.now - started


class TestOps:
    def test_forward_follows_tokens_and_squares(self) -> None:
        time = FakeTime()
        took = lasted(time, lambda started: padding(time).pad_op(OpKind.F, 0, 5, 13, started, 0.0))
        assert took == pytest.approx(0.001 * 50 + 1e-5 * 1300 + 0.002, abs=1e-5)

    @pytest.mark.parametrize(("kind", "seconds"), [(OpKind.B, 0.003 * 50), (OpKind.W, 0.001 * 50)])
    def test_each_kind_of_op_has_its_own_cost(self, kind: OpKind, seconds: float) -> None:
        time = FakeTime()
        took = lasted(time, lambda started: padding(time).pad_op(kind, 0, 5, 13, started, 0.0))
        assert took == pytest.approx(seconds, abs=1e-5)

    @given(speed=st.floats(0.01, 1.0), waited=st.floats(0.0, 0.5))
    def test_own_work_is_slowed_and_waiting_is_not(self, speed: float, waited: float) -> None:
        time = FakeTime()
        pads = padding(time, Slowness({1: speed}))
        took = lasted(time, lambda started: pads.pad_op(OpKind.B, 0, 5, 13, started, waited))
        assert took == pytest.approx(0.15 / speed + waited, abs=1e-4)

    def test_other_workers_slowness_is_not_ours(self) -> None:
        time = FakeTime()
        pads = padding(time, Slowness({0: 0.1, 2: 0.5}))
        took = lasted(time, lambda started: pads.pad_op(OpKind.B, 0, 5, 13, started, math.nan))
        assert took == pytest.approx(0.15, abs=1e-5)

    def test_one_that_takes_longer_than_the_device_is_counted(self) -> None:
        time = FakeTime()
        pads = padding(time)
        started, time.now = time.now, time.now + 0.2
        assert pads.pad_op(OpKind.B, 0, 5, 13, started, 0.0) == pytest.approx(0.05, abs=1e-4)
        assert (pads.ops, pads.late) == (1, 1) and time.now - started < 0.2001
        assert pads.pad_op(OpKind.B, 0, 5, 13, time.now, 0.0) == pytest.approx(0.0, abs=1e-5)
        assert (pads.ops, pads.late) == (2, 1)

    def test_waking_up_late_is_told(self) -> None:
        time = FakeTime()
        time.sleep = lambda seconds: setattr(time, "now", time.now + max(seconds, 0.2))
        pads = padding(time)
        assert pads.pad_op(OpKind.B, 0, 5, 13, time.now, 0.0) == pytest.approx(0.05, abs=1e-3)
        assert (pads.ops, pads.late) == (1, 0)

    def test_noise_is_of_the_size_asked_for_and_of_a_seed(self) -> None:
        def durations() -> list[float]:
            time = FakeTime()
            pads = padding(time, noise=0.02)
            return [lasted(time, lambda t: pads.pad_op(OpKind.B, 0, 5, 13, t, 0.0)) for _ in range(500)]

        found = durations()
        assert statistics.mean(found) == pytest.approx(0.15, rel=0.005)
        assert statistics.stdev(found) == pytest.approx(0.02 * 0.15, rel=0.15)
        assert found == durations()

    def test_a_broken_epoch_is_not_slept_through(self) -> None:
        time = FakeTime()
        pads = padding(time, Slowness({1: 0.01}), interrupted=lambda: time.now > 101.0)
        took = lasted(time, lambda started: pads.pad_op(OpKind.B, 0, 5, 13, started, 0.0))
        assert took < 1.0 + 2 * SLICE_S


class TestTransfers:
    def test_latency_and_bandwidth_from_when_it_came(self) -> None:
        time = FakeTime()
        before = time.now
        assert padding(time).pad_transfer(2, before, 40.0) == pytest.approx(0.0, abs=1e-5)
        assert time.now - before == pytest.approx(0.01 + 50 / 1000, abs=1e-5)

    def test_waking_up_late_is_told(self) -> None:
        time = FakeTime()
        time.sleep = lambda seconds: setattr(time, "now", time.now + max(seconds, 0.2))
        assert padding(time).pad_transfer(2, time.now, 40.0) == pytest.approx(0.14, abs=1e-3)

    @pytest.mark.parametrize(("slow", "factor"), [((1, 2), 0.2), ((0, 2), 1.0), ((1, 3), 1.0)])
    def test_a_slow_link_slows_its_own_ends(self, slow: tuple[int, int], factor: float) -> None:
        time = FakeTime()
        before = time.now
        padding(time, Slowness(links={slow: 0.2})).pad_transfer(2, before, 40.0)
        assert time.now - before == pytest.approx(0.06 / factor, abs=1e-5)

    def test_what_was_sent_long_ago_is_there(self) -> None:
        time = FakeTime()
        before = time.now
        padding(time).pad_arrival(before - 1.0)
        assert time.now - before < 1e-5
        padding(time).pad_arrival(before + 0.5)
        assert time.now == pytest.approx(before + 0.5, abs=1e-5)

    def test_within_a_node(self) -> None:
        time = FakeTime()
        before = time.now
        padding(time).pad_transfer(0, before, 40.0)
        assert time.now - before < 1e-5


def test_a_benchmark_takes_the_same_whatever_is_held_and_longer_on_a_slow_worker() -> None:
    time = FakeTime()
    for speed in (1.0, 0.25):
        began = time.now
        padding(time, Slowness({1: speed})).pad_benchmark()
        assert time.now - began == pytest.approx((0.001 * 1000 + 1e-5 * 1000**2 + 0.002) * 0.1 / speed, rel=1e-3)


def test_what_is_sent_to_those_who_share_takes_a_slow_worker_no_longer() -> None:
    """Its links are as fast as before."""
    time = FakeTime()
    pads = padding(time, Slowness({1: 0.5}), exchanged=lambda kind, chunk: 0.25 if kind is OpKind.F else 0.0)
    for kind, seconds in ((OpKind.F, 2 * (10 * 0.001 + 100 * 1e-5 + 0.002) + 0.25), (OpKind.B, 2 * 10 * 0.003)):
        began = time.now
        pads.pad_op(kind, 0, 1.0, 1.0, began, 0.0)
        assert time.now - began == pytest.approx(seconds, rel=1e-3)
