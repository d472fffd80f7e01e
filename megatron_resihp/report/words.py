# SPDX-License-Identifier: Apache-2.0
"""Counts, durations and sizes in the words of this package's pages.

May import: the standard library and the classes of events.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Protocol

from megatron_resihp.events.workers import WorkerStarted

NONE = "-"
_ADDRESS = re.compile(r"[\d.]+")


def count(number: int, noun: str, plural: str | None = None) -> str:
    """For example "1 worker", "2 recoveries", "no worker"."""
    if number == 0:
        return f"no {noun}"
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listing(items: Iterable[object]) -> str:
    """For example "1, 2 and 5"."""
    *most, last = [str(item) for item in items]
    return f"{', '.join(most)} and {last}" if most else last


def ranges(workers: Iterable[int]) -> str:
    """For example "0–3, 7"."""
    runs = []
    for _, run in groupby(enumerate(workers), lambda item: item[1] - item[0]):
        members = [worker for _, worker in run]
        runs.append(f"{members[0]}–{members[-1]}" if len(members) > 2 else ", ".join(map(str, members)))
    return ", ".join(runs)


def milliseconds(value: float | None) -> str:
    """A number for a column with the heading "ms"."""
    if value is None:
        return NONE
    return f"{value:,.1f}" if abs(value) < 10 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """For example "480 ms", "12.3 s", "4 min 5 s", "3 h 20 min"."""
    if seconds < 1:
        return f"{milliseconds(1000 * seconds)} ms"
    if seconds < 119.5:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def size(number: int | None) -> str:
    """For example "0 bytes", "12.3 MiB"."""
    if number is None:
        return NONE
    value = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1023.5:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def where(started: WorkerStarted) -> str:
    """For example "node7, GPU 2"."""
    machine = started.host if _ADDRESS.fullmatch(started.host) else started.host.partition(".")[0]
    return machine if started.gpu is None else f"{machine}, GPU {started.gpu}"


def worker_at(worker: int, places: Mapping[int, str]) -> str:
    """For example "worker 3 (node7, GPU 2)"; "worker 3" where its place is unknown."""
    return f"worker {worker} ({places[worker]})" if worker in places else f"worker {worker}"


class SpeedFound(Protocol):
    """A verdict, in the event log or in a summary."""

    @property
    def kind(self) -> str: ...
    @property
    def change(self) -> str: ...
    @property
    def workers(self) -> Sequence[int]: ...
    @property
    def speed(self) -> float: ...
    @property
    def speed_low(self) -> float | None: ...
    @property
    def speed_high(self) -> float | None: ...
    @property
    def since(self) -> int: ...


def verdict(found: SpeedFound, places: Mapping[int, str]) -> str:
    """For example "worker 5 (node7, GPU 2) runs at 80 % of its healthy speed since iteration 60"."""
    if found.kind == "compute":
        who = worker_at(found.workers[0], places)
    else:
        ends = (f"{worker} ({places[worker]})" if worker in places else worker for worker in found.workers)
        who = f"the link between workers {listing(ends)}"
    if found.change == "recovery":
        return f"{who} has been back at full speed since iteration {found.since}"
    speed = f"{100 * found.speed:.0f} %"
    if found.speed_low is not None and found.speed_high is not None:
        speed += f" ({100 * found.speed_low:.0f} to {100 * found.speed_high:.0f} %)"
    return f"{who} has run at {speed} of its healthy speed since iteration {found.since}"


def rate(samples_per_second: float | None) -> str:
    return NONE if samples_per_second is None else f"{samples_per_second:,.1f}"


def relative_difference(value: float) -> str:
    """For example "relative difference at most 3.1e-07", "identical"."""
    return "identical" if value == 0 else f"relative difference at most {value:.1e}"
