# SPDX-License-Identifier: Apache-2.0
"""Slowing a device in fault injections, on what stands for one: what it is given is done later, in order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from megatron_resihp.control.slowness import SlownessDesk
from megatron_resihp.detector.input.records import OpKind
from megatron_resihp.integration.probes.device_slowing import DeviceSlowing

HZ = 1.5e9


class Device:
    """Does what is queued when somebody waits for it."""

    def __init__(self) -> None:
        self.now, self.hz, self.waits = 0.0, HZ, 0
        self._queue: deque[Callable[[], None]] = deque()

    def work(self, seconds: float) -> None:
        self._queue.append(lambda: self._pass(seconds))

    def sleep(self, cycles: int) -> None:
        self._queue.append(lambda: self._pass(cycles / self.hz))

    def mark(self, event: Event) -> None:
        def note() -> None:
            event.at = self.now

        event.at = math.nan
        self._queue.append(note)

    def drain(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def _pass(self, seconds: float) -> None:
        self.now += seconds


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.at = device, math.nan

    def record(self) -> None:
        self._device.mark(self)

    def query(self) -> bool:
        return not math.isnan(self.at)

    def synchronize(self) -> None:
        self._device.waits += 1
        self._device.drain()

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "CUDA error: device not ready"
        return 1e3 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(device))
    monkeypatch.setattr(torch.cuda, "_sleep", device.sleep)
    return device


class Worker:
    """Runs ops, and tells how long the device was at each."""

    def __init__(self, device: Device, speed: float) -> None:
        self.device, self.speed = device, speed
        self._marks: list[Event] = []
        self._others: list[Event] = []
        self.slowing = DeviceSlowing(lambda: self.speed, lambda mark: self._marks[int(mark)])

    def run(self, *ops: tuple[OpKind, int, float]) -> list[float]:
        """Queue (kind, chunk, seconds), all before the device has done any. Every other call uses the same marks, as
        probes' events are used in every other iteration."""
        ends = []
        self._marks, self._others = self._others, self._marks
        begin = Event(self.device)
        begin.record()
        for index, (kind, chunk, seconds) in enumerate(ops):
            if index == len(self._marks):
                self._marks.append(Event(self.device))
            self._marks[index].record()
            self.device.work(seconds)
            if self.speed < 1.0:
                self.slowing.pad_op(kind, chunk, math.nan, math.nan, index, 0.0)
            ends.append(Event(self.device))
            ends[-1].record()
        self.device.drain()
        times = [begin.at, *(end.at for end in ends)]
        return [after - before for before, after in pairwise(times)]


def test_ops_last_longer_by_the_factor(device: Device) -> None:
    worker = Worker(device, speed=0.8)
    ops = ((OpKind.F, 0, 0.010), (OpKind.F, 1, 0.030), (OpKind.B, 0, 0.020))
    worker.run(*ops)
    assert worker.run(*ops) == pytest.approx([0.0125, 0.0375, 0.025], rel=1e-3)
    assert device.waits == 1  # to time the spinning kernel, once
    worker.speed = 0.5
    assert worker.run(*ops) == pytest.approx([0.020, 0.060, 0.040], rel=1e-3)
    worker.speed = 1.0
    assert worker.run(*ops) == pytest.approx([0.010, 0.030, 0.020])


def test_a_clock_that_drifts(device: Device) -> None:
    """A device under load runs at another frequency than when the kernel was timed."""
    worker = Worker(device, speed=0.5)
    op = (OpKind.F, 0, 0.010)
    worker.run(op)
    device.hz = HZ / 2
    worker.run(op)
    assert worker.run(op) == pytest.approx([0.020], rel=1e-3)


def test_a_slowdown_that_outlives_an_epoch(device: Device) -> None:
    """The op that waited for a dead peer until the abort tells nothing of those that follow."""
    worker = Worker(device, speed=0.5)
    op = (OpKind.F, 0, 0.010)
    worker.run(op)
    assert worker.run(op) == pytest.approx([0.020], rel=1e-3)
    worker.run((OpKind.F, 0, 30.0))
    worker.slowing.begin_epoch()
    smaller = (OpKind.F, 0, 0.004)  # another plan
    assert worker.run(smaller) == pytest.approx([0.004], rel=1e-3)
    assert worker.run(smaller) == pytest.approx([0.008], rel=1e-3)


def test_a_slowdown_that_comes_back(device: Device) -> None:
    """What it has left unread is of events that later ops have recorded anew."""
    worker = Worker(device, speed=0.5)
    op = (OpKind.F, 0, 0.010)
    worker.run(op, op)
    worker.speed = 1.0
    worker.run(op)
    worker.speed = 0.5
    worker.run(op)
    assert worker.run(op) == pytest.approx([0.020], rel=1e-3)


def test_a_benchmark_of_a_slowed_device(device: Device) -> None:
    worker = Worker(device, speed=0.5)
    worker.slowing.stretch(lambda: device.work(0.001))
    device.drain()
    began = device.now
    worker.slowing.stretch(lambda: device.work(0.001))
    device.drain()
    assert device.now - began == pytest.approx(0.002, rel=1e-3)


@pytest.mark.parametrize(
    ("emulated", "on_devices", "by_agents"),
    ((False, False, True), (True, False, False), (False, True, False)),
    ids=("CPUs", "emulated clock", "GPUs"),
)
def test_who_slows_a_worker(emulated: bool, on_devices: bool, by_agents: bool) -> None:
    """A device works on while its process is stopped."""
    desk: Any = SlownessDesk(2, emulated, on_devices=on_devices)
    assert desk.notice().by_agents is by_agents
