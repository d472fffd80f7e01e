# SPDX-License-Identifier: Apache-2.0
"""`--dead`, `--slow` and `--link` → a health. May import: the standard library, `planner.health` and this package."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from megatron_resihp.planner.health import Health, HealthError
from megatron_resihp.report.words import ranges


class HealthFlagError(ValueError):
    """Flags that describe no health; the message is one line for the user."""


def health_of(dead: Sequence[str], slow: Sequence[str], link: Sequence[str], workers: Iterable[int]) -> Health:
    """The health that the flags describe; workers that they don't name are healthy.

    Raises:
        HealthFlagError: a flag can't be read, names an unknown worker, or contradicts another.
    """
    known = sorted(workers)
    gone = _each_once([worker for text in dead for worker in _workers(text, "--dead", text, known)], "--dead", known)
    speeds: dict[int, float] = {}
    for text in slow:
        left, speed = _value(text, "--slow", "5=0.5")
        for worker in _each_once([*speeds, *_workers(left, "--slow", text, known)], "--slow", known)[len(speeds) :]:
            if worker in gone:
                raise HealthFlagError(f"worker {worker} is given as dead and as slow; give only one")
            speeds[worker] = speed
    links: dict[tuple[int, int], float] = {}
    for text in link:
        pair, speed = _pair(text, known, gone)
        if pair in links:
            raise HealthFlagError(f"--link names the link {pair[0]}-{pair[1]} twice")
        links[pair] = speed
    try:
        return Health({worker: speeds.get(worker, 1.0) for worker in known if worker not in gone}, links)
    except HealthError as error:
        raise HealthFlagError(str(error)) from None


def _value(text: str, flag: str, example: str) -> tuple[str, float]:
    left, _, right = text.partition("=")
    try:
        return left, float(right)
    except ValueError:
        raise HealthFlagError(f"{flag} {text} can't be read; give it like {example}") from None


def _workers(text: str, flag: str, whole: str, known: Sequence[int]) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise HealthFlagError(f"{flag} {whole} can't be read; name workers like 3, 8-15 or 3,5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            mend = f"give the lower worker first, as in {last}-{first}"
            raise HealthFlagError(f"{flag} {whole} ends before it begins; {mend}")
        # Before the range is expanded: it may have any length.
        _check_known(last, flag, known)
        found += range(first, last + 1)
    return found


def _each_once(workers: list[int], flag: str, known: Sequence[int]) -> list[int]:
    for place, worker in enumerate(workers):
        _check_known(worker, flag, known)
        if worker in workers[:place]:
            raise HealthFlagError(f"{flag} names worker {worker} twice")
    return workers


def _check_known(worker: int, flag: str, known: Sequence[int]) -> None:
    if worker not in known:
        raise HealthFlagError(f"{flag} names worker {worker}; the job's live workers are {ranges(known)}")


def _pair(text: str, known: Sequence[int], gone: Sequence[int]) -> tuple[tuple[int, int], float]:
    left, speed = _value(text, "--link", "1-5=0.3")
    ends = re.fullmatch(r"(\d+)-(\d+)", left)
    if ends is None or ends[1] == ends[2]:
        raise HealthFlagError(f"--link {text} can't be read; give it like 1-5=0.3")
    first, second = sorted(map(int, ends.groups()))
    for worker in (first, second):
        _check_known(worker, "--link", known)
        if worker in gone:
            raise HealthFlagError(f"worker {worker} is given as dead and as an end of link {first}-{second}")
    return (first, second), speed
