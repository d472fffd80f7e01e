# SPDX-License-Identifier: Apache-2.0
"""Really slows a GPU on request: each op is followed by a kernel that spins on the op's stream.

A worker's process can be stopped, but its device works on through what is queued. Nothing here waits for the device but
the first op that is slowed, for which the spinning kernel is timed once. Imports torch and `detector.input.records`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from megatron_resihp.detector.input.records import OpKind

TRIED_CYCLES: Final = 10_000_000
"""Cycles of the device's clock, some milliseconds."""
TELLING_CYCLES: Final = 1_000_000
"""What takes fewer of them says little of the clock."""


@dataclass(frozen=True)
class _Slowed:
    """An op whose times are not known yet: events at its start and its end, and after the spinning."""

    op: tuple[OpKind, int]
    started: Any
    worked: Any
    spun: Any
    cycles: int


class DeviceSlowing:
    """Slows one worker's ops.

    Args:
        speed: in (0, 1], that it is to have now.
        event: the device's event behind a mark.
    """

    def __init__(self, speed: Callable[[], float], event: Callable[[float], Any]) -> None:
        self._speed = speed
        self._event = event
        self._cycles_per_s = 0.0
        self._usual: dict[tuple[OpKind, int], float] = {}
        self._running: list[_Slowed] = []

    @property
    def speed(self) -> float:
        return self._speed()

    def begin_epoch(self) -> None:
        """Forget how long ops take: those of a broken epoch may have waited for a dead peer, and chunks change."""
        self._usual.clear()
        self._running.clear()

    def pad_op(self, kind: OpKind, chunk: int, tokens: float, squares: float, started: float, waited: float) -> float:
        """Let the op that has just been queued last longer, by what the last one of its kind took.

        The first one of each kind only shows how long that is. See `op_notes.PadOp`.
        """
        self._read()
        op = (kind, chunk)
        worked, spun = _new_event(), _new_event()
        worked.record()
        cycles = self._spin(self._usual.get(op, 0.0))
        spun.record()
        self._running.append(_Slowed(op, self._event(started), worked, spun, cycles))
        return 0.0

    def stretch(self, action: Callable[[], Any]) -> None:
        """Do something, and spin for as long as it would have taken longer. Waits for the device if it is slowed."""
        if self.speed == 1.0:
            action()
            return
        before, after = _new_event(), _new_event()
        before.record()
        action()
        after.record()
        after.synchronize()
        self._spin(before.elapsed_time(after) / 1e3)

    def _spin(self, seconds: float) -> int:
        """Spin for what is missing to work of `seconds`; returns the cycles."""
        if self._cycles_per_s == 0.0:
            self._cycles_per_s = _cycles_per_s()
        cycles = int(seconds * (1.0 / self.speed - 1.0) * self._cycles_per_s)
        if cycles > 0:
            torch.cuda._sleep(cycles)
        return cycles

    def _read(self) -> None:
        """Learn from ops that are over; they end in the order in which they were queued."""
        while self._running and self._running[0].spun.query():
            over = self._running.pop(0)
            # Where no op was slowed for a while, the first event may be a later op's by now.
            seconds = over.started.elapsed_time(over.worked) / 1e3 if over.started.query() else 0.0
            if seconds > 0:
                self._usual[over.op] = seconds
            if over.cycles >= TELLING_CYCLES:
                self._cycles_per_s = over.cycles / (over.worked.elapsed_time(over.spun) / 1e3)


def _cycles_per_s() -> float:
    before, after = _new_event(), _new_event()
    torch.cuda._sleep(TRIED_CYCLES)  # the first one loads the kernel
    before.record()
    torch.cuda._sleep(TRIED_CYCLES)
    after.record()
    after.synchronize()
    return float(TRIED_CYCLES / (before.elapsed_time(after) / 1e3))


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)
