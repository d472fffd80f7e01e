# SPDX-License-Identifier: Apache-2.0
"""What killed a worker, as far as its agent can see. Imports the standard library.

`known_cause` is pure; `MemoryKills` reads counters of the kernel.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

OUT_OF_MEMORY: Final = "out-of-memory killer"
LAST_WORDS: Final = re.compile(r"resihp: (.+); this worker dies")
"""What a worker says that kills itself; see `linux.die`."""
ERROR: Final = re.compile(r"(\w*(Error|Exception)\b.*|Fatal Python error: .*|terminate called .*|.*\bwhat\(\): .*)")
"""How a line begins that says what an uncaught error was, of Python or of C++."""
LONGEST: Final = 300

FRESH_S: Final = 60.0
"""A process with much memory takes a while from being killed to being gone."""
CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUPS: Final = Path("/proc/self/cgroup")
ALL_KILLS: Final = Path("/proc/vmstat")


def known_cause(code: int, last_lines: Sequence[str], out_of_memory: bool) -> str | None:
    """Why a worker ended with this exit code, negative for a signal; None: nothing beside the code tells.

    Args:
        last_lines: of its output.
        out_of_memory: whether the kernel has killed something for want of memory just now.
    """
    if code == -signal.SIGKILL:
        said = next((match[1] for line in reversed(last_lines) if (match := LAST_WORDS.fullmatch(line))), None)
        return said or (OUT_OF_MEMORY if out_of_memory else None)
    found = next((line.strip() for line in reversed(last_lines) if ERROR.fullmatch(line.strip())), None)
    return found and found[:LONGEST]


def ending(code: int, cause: str | None) -> str:
    """For example "exit signal 11 (SIGSEGV)", "exit code 3", "out-of-memory killer, exit signal 9"."""
    how = f"exit code {code}" if code >= 0 else f"exit signal {-code}"
    if code < 0 and -code != signal.SIGKILL:
        how += f" ({_name(-code)})"
    return f"{cause}, {how}" if cause else how


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "no name"


class MemoryKills:
    """Whether the out-of-memory killer was at work among this node's processes. Ask often: it remembers for a minute.

    Args:
        counters: files that count its kills, the nearest one first; the first that can be read is used.
    """

    def __init__(self, counters: Sequence[Path] | None = None) -> None:
        self._counter = next(filter(lambda path: _kills(path) is not None, counters or _counters()), None)
        self._seen = self._count()
        self._open: list[float] = []
        """When kills were seen that no death has been put down to."""

    def look(self, now: float) -> None:
        """Take note of new kills; `now` in seconds of a monotonic clock."""
        count = self._count()
        self._open += [now] * (count - self._seen)
        self._seen = count

    def take(self, now: float) -> bool:
        """Whether there was one just now that no death has been put down to yet; this one is."""
        self.look(now)
        self._open = [seen for seen in self._open if now - seen <= FRESH_S]
        return bool(self._open) and self._open.pop() is not None

    def _count(self) -> int:
        return (_kills(self._counter) or 0) if self._counter is not None else 0


def _counters() -> Iterator[Path]:
    """The counters of this process's control group, of version 2 or 1, then of the whole machine."""
    try:
        lines = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    except OSError:
        lines = []
    for _, controllers, path in lines:
        # In a container its own group may be mounted as the root.
        for below in (path.strip("/"), ""):
            if controllers == "":
                yield CGROUPS / below / "memory.events"
            elif "memory" in controllers.split(","):
                yield CGROUPS / "memory" / below / "memory.oom_control"
    yield ALL_KILLS


def _kills(path: Path) -> int | None:
    """The count in such a file; None: there is none."""
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
