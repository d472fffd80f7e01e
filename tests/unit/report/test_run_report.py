# SPDX-License-Identifier: Apache-2.0
"""What a job's events become while its disk is full: told on the terminal, missing in the log, and owned up to."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.events import log as events
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.job import LogGap
from megatron_resihp.events.log import read_events
from megatron_resihp.report.live.run_report import RunReport
from megatron_resihp.report.run.summary import summarize_log


class Disk:
    """Takes `room` bytes more, then none."""

    def __init__(self) -> None:
        self.room = 1 << 30

    def write(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.pwrite(file, data[: self.room], os.fstat(file).st_size)
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(events.os, "write", disk.write)
    return disk


def play(run: Any, report: RunReport, already: int = 0) -> int:
    bus = EventBus()
    report.follow(bus)
    for event in run.events[already:]:
        bus.publish(event)
    return len(run.events)


def test_a_full_disk_silences_neither_the_terminal_nor_the_last_page(
    tmp_path: Path, disk: Disk, synthetic_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run, stream = synthetic_run(), io.StringIO()
    report = RunReport(tmp_path, stream)
    run.step(12)
    told = play(run, report)
    disk.room = 100
    run.step(27)
    run.write("verdict", kind="compute", change="onset", workers=[5], speed=0.8, since=20, iteration=23)
    run.step(1)
    run.finish()
    play(run, report, told)
    report.finish()
    assert "iteration 23: worker 5 has run at 80 %" in stream.getvalue()
    page = stream.getvalue()[stream.getvalue().rindex("Ended with") :]
    assert page.startswith("Ended with exit code 0, but the log is incomplete: iteration 12 of 40 is its last; ")
    assert "samples: can't tell: log damaged" in page
    assert "86 events could not be written to the event log" in page
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "No space left on device" in warning


def test_the_log_goes_on_where_there_is_room_again(
    tmp_path: Path, disk: Disk, synthetic_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = synthetic_run()
    report = RunReport(tmp_path, io.StringIO())
    run.step(12)
    told = play(run, report)
    disk.room = 100
    run.step(1)
    told = play(run, report, told)
    disk.room = 1 << 30
    run.step(27)
    run.finish()
    play(run, report, told)
    report.finish()
    found = read_events(tmp_path / "events.jsonl")
    (gap,) = [event for event in found.events if isinstance(event, LogGap)]
    assert gap.events == 3 and len(found.malformed) == 1
    summary = summarize_log(found)
    assert (summary.iterations, summary.completed, summary.log_damaged) == (40, True, True)
    assert capsys.readouterr().err.count("\n") == 1
