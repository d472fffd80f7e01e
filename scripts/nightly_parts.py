# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for scripts/nightly.sh: runs one of N parts of the tests that were collected, of about equal length.

The collected order is cut, so that tests of a file, which share reference runs, mostly stay together. Lengths are those
of an earlier night, in seconds by node id. A test without a length takes that of its function or file, or the average.
Imports pytest.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

SECONDS = Path(__file__).resolve().parent.parent / "tests" / "nightly_seconds.json"
RECORDED = SECONDS.with_suffix(".new.json")
"""Another file, because parts that run one after the other must be cut by the same lengths."""
FIRST_GUESS_S = 15.0
"""Assumed length of a test while no length is known."""


def cut(lengths: Sequence[float], parts: int) -> list[range]:
    """The places of a list's elements in each of its parts, in order; the longest part is as short as it can be."""
    # Sums in another order differ in the last bits.
    low, high = max(lengths, default=0.0), sum(lengths) * (1.0 + 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(lengths, middle)) <= parts else (middle, high)
    found = _filled(lengths, high)
    return found + [range(len(lengths), len(lengths))] * (parts - len(found))


def _filled(lengths: Sequence[float], most: float) -> list[range]:
    """As few parts as possible, none longer than `most`; no element may be longer than `most`."""
    starts, length = [0], 0.0
    for place, each in enumerate(lengths):
        if length + each > most and place > starts[-1]:
            starts.append(place)
            length = 0.0
        length += each
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(lengths)], strict=True)]


def lengths_of(tests: Sequence[str], known: Mapping[str, float]) -> list[float]:
    """Seconds that each test may take: its own, its function's, its file's, or the average of all that are known."""
    average = sum(known.values()) / len(known) if known else FIRST_GUESS_S

    def length(test: str) -> float:
        names = (test, test.partition("[")[0], test.partition("::")[0])
        return next((known[name] for name in names if name in known), average)

    return [length(test) for test in tests]


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise pytest.UsageError(f"--part {text} is none; give I/N, from 1/N to N/N")
    return int(match[1]), int(match[2])


# ---- pytest's hooks


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that nightly.sh passes on."""
    group = parser.getgroup("nightly")
    group.addoption("--part", default="1/1", metavar="I/N", help="run part I of N")
    group.addoption("--list", action="store_true", help="show the N parts and run nothing")
    group.addoption("--record", action="store_true", help=f"note in tests/{RECORDED.name} how long each test takes")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this part."""
    number, parts = _part(config.getoption("--part"))
    known = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    lengths = lengths_of([item.nodeid for item in items], known)
    ranges = cut(lengths, parts)
    if config.getoption("--list"):
        for one, places in enumerate(ranges, 1):
            seconds = sum(lengths[place] for place in places)
            print(f"\npart {one}/{parts}: {len(places)} tests, about {seconds / 60:.1f} minutes")
            print("\n".join(f"  {items[place].nodeid}" for place in places))
        items.clear()
        return
    own = ranges[number - 1]
    config.hook.pytest_deselected(items=[item for place, item in enumerate(items) if place not in own])
    items[:] = [items[place] for place in own]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Record the durations of tests that passed."""
    if not config.getoption("--record"):
        return
    took: dict[str, float] = {}
    bad = {report.nodeid for kind in ("failed", "error", "skipped") for report in terminalreporter.stats.get(kind, ())}
    for kind in ("", "passed"):
        for report in terminalreporter.stats.get(kind, ()):
            if report.nodeid not in bad and hasattr(report, "duration"):
                took[report.nodeid] = took.get(report.nodeid, 0.0) + report.duration
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    known |= {test: round(seconds, 1) for test, seconds in took.items()}
    RECORDED.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Exit with 0 after --list, and for a part without tests."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
