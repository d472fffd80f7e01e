# SPDX-License-Identifier: Apache-2.0
"""The device's clock: events, told in the host's seconds once the device has been waited for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from megatron_resihp.integration.probes import probe_clock
from megatron_resihp.integration.probes.probe_clock import DeviceClock


class Device:
    """A device whose time runs apart from the host's; its events can be asked only once it was waited for."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.made = 0

    def make_event(self, enable_timing: bool) -> Event:
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at = math.nan

    def record(self) -> None:
        self.at = self._device.now

    def elapsed_time(self, end: Event) -> float:
        assert self.at <= end.at
        return 1e3 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.make_event)
    monkeypatch.setattr(probe_clock.time, "monotonic", lambda: 50.0)
    return device


def take(clock: DeviceClock, device: Device, seconds: float) -> float:
    device.now += seconds
    return clock.mark()


def test_marks_before_and_after_the_anchor_are_told_in_the_hosts_seconds(device: Any) -> None:
    clock = DeviceClock()
    first, second = take(clock, device, 0.0), take(clock, device, 2.0)
    device.now += 1.0
    clock.anchor()
    third = take(clock, device, 0.5)
    marks = np.array([third, first, math.nan, second])
    assert clock.resolve(marks) == pytest.approx([50.5, 47.0, math.nan, 49.0], nan_ok=True)


def test_events_are_used_again(device: Any) -> None:
    clock = DeviceClock()
    for _ in range(3):
        for _ in range(10):
            clock.mark()
        clock.anchor()
        clock.reset()
    assert device.made == 11  # ten and the anchor


def test_without_an_anchor_nothing_is_known(device: Any) -> None:
    clock = DeviceClock()
    assert np.isnan(clock.resolve(np.array([clock.mark()]))).all()
    assert len(clock.resolve(np.array([]))) == 0
