# SPDX-License-Identifier: Apache-2.0
"""When a worker's process was stopped, as its agent notes it and the worker reads it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from megatron_resihp.control.node import absences
from megatron_resihp.control.node.absences import Page, Seen, Watch
from megatron_resihp.detector.input.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord, SpanKind
from megatron_resihp.integration.probes.probe_sheet import with_absences

BOUND_S = 10.0


@pytest.fixture
def child() -> Iterator[int]:
    """A process that does nothing."""
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def looked_until(watch: Watch, seen: Seen, count: int) -> list[absences.Absence]:
    deadline = time.monotonic() + BOUND_S
    while len(found := seen.between(0.0, float("inf"))) < count and time.monotonic() < deadline:
        watch.look(time.monotonic())
    return found


def test_the_page_of_a_worker_that_has_ended_is_not_kept(child: int) -> None:
    before = set(os.listdir("/proc/self/fd"))
    page = Page()
    watch = Watch(child, page)
    opened = set(os.listdir("/proc/self/fd")) - before
    os.close(page.fd)
    watch.close()
    assert opened and not opened & set(os.listdir("/proc/self/fd"))


def test_stops_of_a_child_are_noted(child: int) -> None:
    page = Page()
    watch, seen = Watch(child, page), Seen(page.fd)
    watch.look(time.monotonic())
    for turn in (1, 2):
        before = time.monotonic()
        os.kill(child, signal.SIGSTOP)
        os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
        watch.look(stopped := time.monotonic())
        os.kill(child, signal.SIGCONT)
        found = looked_until(watch, seen, turn)
        assert len(found) == turn and found[-1][0] == stopped and before < stopped < found[-1][1] <= time.monotonic()


def test_a_child_that_has_gone_is_nobodys_trouble() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], os.environ)
    os.waitpid(pid, 0)
    Watch(pid, Page()).look(1.0)


def test_absences_of_a_time_are_cut_to_it_and_only_the_newest_are_kept() -> None:
    page = Page()
    seen = Seen(os.dup(page.fd))
    assert seen.between(0.0, 9.0) == []
    for number in range(absences.KEPT + 10):
        page.note((number, number + 0.5))
    assert seen.between(99.25, 101.25) == [(99.25, 99.5), (100.0, 100.5), (101.0, 101.25)]
    assert seen.between(0.0, 9.0) == []


def test_they_become_spans_of_the_record() -> None:
    empty = [np.zeros(0, kind) for kind in (OP, TRANSFER, WORKLOAD, SPAN)]
    record = IterationRecord(0, 1, 2, 0, 10.0, 20.0, *empty)
    assert with_absences(record, []) is record
    told = with_absences(replace(record, spans=np.array([(SpanKind.SAVE, 1, 2)], SPAN)), [(11.0, 12.0)])
    assert told.spans.tolist() == [(SpanKind.SAVE, 1, 2), (SpanKind.ABSENT, 11.0, 12.0)]
