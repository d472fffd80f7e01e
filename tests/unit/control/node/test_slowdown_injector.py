# SPDX-License-Identifier: Apache-2.0
"""Slowing processes for real: the duty cycle, and that nobody is left stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.control.node.slowdown_injector import LONGEST_STOP_S, PERIOD_S, DutyCycle, SlowdownInjector

Busy = subprocess.Popen[bytes]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def eventually(test: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10.0
    while not test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


class TestDutyCycle:
    @given(speed=st.floats(0.05, 0.99), late=st.lists(st.floats(0.0, 0.005), min_size=50, max_size=50))
    def test_the_share_is_kept_whoever_is_late(self, speed: float, late: list[float]) -> None:
        """Slices may last longer than they should; that is made up for, and they do not grow by it."""
        cycle = DutyCycle(speed)
        ran = stopped = lasted = 0.0
        for run_late, stop_late in zip(late[::2], late[1::2], strict=True):
            run = cycle.run_after(lasted) + run_late
            lasted = cycle.stop_after(run) + stop_late
            ran, stopped = ran + run, stopped + lasted
            assert -1e-9 <= stopped - ran * (1.0 - speed) / speed <= stop_late + 1e-9
            assert lasted <= LONGEST_STOP_S

    @given(speed=st.floats(0.01, 0.99))
    def test_slices_are_short(self, speed: float) -> None:
        cycle = DutyCycle(speed)
        run = cycle.run_after(0.0)
        assert run + cycle.stop_after(run) == pytest.approx(PERIOD_S)
        assert cycle.stop_after(60.0) <= LONGEST_STOP_S


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing but take processor time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def injector(busy: subprocess.Popen[bytes]) -> Iterator[SlowdownInjector]:
    pidfd = os.pidfd_open(busy.pid)
    found = SlowdownInjector({3: (busy.pid, pidfd)})
    try:
        yield found
    finally:
        found.close()
        os.close(pidfd)


class TestSlowdownInjector:
    def test_a_slow_worker_is_stopped_and_goes_on(
        self, injector: SlowdownInjector, busy: subprocess.Popen[bytes]
    ) -> None:
        injector.slow({3: 0.2})
        for _ in range(3):
            assert eventually(lambda: state(busy.pid) == "T")
            assert eventually(lambda: state(busy.pid) != "T")

    @pytest.mark.parametrize(("speed", "least", "most"), [(0.2, 0.5, 1.0), (0.8, 0.02, 0.5)])
    def test_it_is_stopped_for_about_the_rest_of_the_time(
        self, injector: SlowdownInjector, busy: subprocess.Popen[bytes], speed: float, least: float, most: float
    ) -> None:
        injector.slow({3: speed})
        stopped, looked = 0.0, time.monotonic()
        end = looked + 0.5
        while looked < end:
            before, looked = looked, time.monotonic()
            stopped += (looked - before) * (state(busy.pid) == "T")
            time.sleep(0.0005)
        assert least < stopped / 0.5 < most

    @pytest.mark.parametrize("end", [lambda s: s.slow({}), lambda s: s.forget(3), lambda s: s.close()])
    def test_it_is_never_left_stopped(
        self, injector: SlowdownInjector, busy: subprocess.Popen[bytes], end: Callable[[SlowdownInjector], None]
    ) -> None:
        injector.slow({3: 0.01})
        assert eventually(lambda: state(busy.pid) == "T")
        end(injector)
        assert eventually(lambda: state(busy.pid) != "T")
        time.sleep(3 * PERIOD_S)
        assert state(busy.pid) != "T"

    def test_who_was_stopped_by_others_stays_so(
        self, injector: SlowdownInjector, busy: subprocess.Popen[bytes]
    ) -> None:
        busy.send_signal(signal.SIGSTOP)
        assert eventually(lambda: state(busy.pid) == "T")
        injector.slow({3: 0.5})
        time.sleep(5 * PERIOD_S)
        injector.slow({})
        assert state(busy.pid) == "T"

    def test_death_while_it_is_sliced(self, injector: SlowdownInjector, busy: Busy) -> None:
        injector.slow({3: 0.01})
        assert eventually(lambda: state(busy.pid) == "T")
        busy.kill()
        assert busy.wait(10.0) == -signal.SIGKILL
        injector.forget(3)
        injector.slow({3: 0.5})

    def test_workers_of_other_nodes_are_not_its_business(self, injector: SlowdownInjector) -> None:
        injector.slow({0: 0.5, 7: 0.5})
        injector.slow({})
