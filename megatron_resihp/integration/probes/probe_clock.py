# SPDX-License-Identifier: Apache-2.0
"""The clocks that probes read: the host's on CPUs, events on the current stream on GPUs. May import torch.

A mark is what a clock returns when something happens, as a float; `resolve` turns marks into seconds of the host's
monotonic clock, which all processes of one machine share.
"""

import time
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_resihp import cpu


class Clock(Protocol):
    """Where marks come from.

    Attributes:
        immediate: whether a mark is already what `resolve` would make of it.
    """

    immediate: bool

    def mark(self) -> float:
        """Note that this point has been reached."""
        ...

    def anchor(self) -> None:
        """Called just after the host has waited for the device: the one moment at which both clocks can be compared."""

    def resolve(self, marks: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of the host's monotonic clock, NaN where a mark is; all marks must have been reached."""
        ...

    def reset(self) -> None:
        """Forget all marks."""


class HostClock:
    """For work that is done when the call returns."""

    immediate = True
    mark = staticmethod(time.monotonic)

    def anchor(self) -> None:
        pass

    def resolve(self, marks: NDArray[np.float64]) -> NDArray[np.float64]:
        return marks

    def reset(self) -> None:
        pass


class DeviceClock:
    """CUDA events on the current stream; nothing waits for the device. A mark is the index of its event.

    Events are kept and recorded again, since making one costs more than recording it.
    """

    immediate = False

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._used = 0
        self._anchor: Any = None
        self._anchored_at = 0.0
        self._before_anchor = 0

    def mark(self) -> float:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        index = self._used
        self._events[index].record()
        self._used += 1
        return float(index)

    def event(self, mark: float) -> Any:
        """The event behind a mark; it is another one's after the next `reset`."""
        return self._events[int(mark)]

    def anchor(self) -> None:
        if self._anchor is None:
            self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor.record()
        self._anchored_at = time.monotonic()
        self._before_anchor = self._used

    def resolve(self, marks: NDArray[np.float64]) -> NDArray[np.float64]:
        seconds = np.full(self._used + 1, np.nan)
        if self._anchor is not None:
            for index, event in enumerate(self._events[: self._used]):
                # Asked the other way round, CUDA promises nothing.
                if index < self._before_anchor:
                    seconds[index] = self._anchored_at - event.elapsed_time(self._anchor) / 1e3
                else:
                    seconds[index] = self._anchored_at + self._anchor.elapsed_time(event) / 1e3
        # The last element stands for marks that are NaN.
        return seconds[np.where(np.isnan(marks), self._used, marks).astype(np.int64)]

    def reset(self) -> None:
        self._used = self._before_anchor = 0


def make_clock() -> Clock:
    """The clock for this worker's device."""
    return HostClock() if cpu.installed() else DeviceClock()
