# SPDX-License-Identifier: Apache-2.0
"""What a coordinator that waits for another's loss takes over, and when: it runs here, and etcd is a real one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from etcds import needs_etcd
from launched import eventually
from test_succession import SIZE, run_until

from megatron_resihp.control.commands import standby
from megatron_resihp.control.commands.launch_options import LaunchOptions
from megatron_resihp.control.commands.launcher import NoEvents
from megatron_resihp.control.commands.seat import Seat
from megatron_resihp.control.coordination.decisions.entries import Entry
from megatron_resihp.control.head.etcd_log import EtcdLog
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.leadership import Leadership
from megatron_resihp.control.transport.etcd.location import Location

pytestmark = needs_etcd

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "LOOK_S", 0.02)


@cache
def entries() -> tuple[Entry, ...]:
    """Of a job that trains."""
    return tuple(run_until(8)[0])


class First:
    """A coordinator, as far as etcd and the run directory know of it. The job's is run "token"."""

    def __init__(self, place: Location, run_dir: Path) -> None:
        self.place, self.run_dir = place, run_dir
        self._leadership = Leadership(place)
        self._log = EtcdLog(self._leadership, threading.Event())
        (run_dir / "secret").write_text("a secret of this job\n")

    def decide(self, *decided: Entry) -> None:
        """It leads again, if its lease has lapsed and no other leads."""
        for entry in decided:
            self._log.write(entry)

    def lapse(self) -> None:
        """etcd has not heard of it for too long."""
        self._leadership.gateway().revoke(self._leadership._lease)

    def close(self) -> None:
        self._log.close()
        self._leadership.close()


@pytest.fixture
def first(place: Location, tmp_path: Path) -> Iterator[First]:
    with closing(First(replace(place, lease_s=2), tmp_path)) as made:
        yield made


class Waiting:
    """A coordinator that waits, in a thread, for the loss of the first one."""

    def __init__(self, first: First) -> None:
        self._options = LaunchOptions(
            (), nodes=SIZE.nodes, alone=True, standby=True, control=first.place, coordinator=Address(HOST, 0),
            run_dir=first.run_dir,
        )  # fmt: skip
        self._stack = ExitStack()
        self.seat: Seat | None = None
        self.ended: Exception | None = None
        self._thread = threading.Thread(target=self._take_over)
        self._thread.start()

    def _take_over(self) -> None:
        try:
            self.seat = standby.take_over(self._options, lambda run_dir: NoEvents(), self._stack)
        except Exception as error:
            self.ended = error

    def taken(self) -> Seat:
        """Where it sits once it has taken over."""
        eventually("it takes over", lambda: self.seat or self.ended)
        assert self.seat is not None, self.ended
        return self.seat

    def close(self) -> None:
        self._thread.join()
        self._stack.close()


@pytest.fixture
def wait(first: First) -> Iterator[Callable[[], Waiting]]:
    made: list[Waiting] = []

    def start() -> Waiting:
        made.append(Waiting(first))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_what_is_decided_while_it_reads_is_not_lost(
    first: First, wait: Callable[[], Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one leads again meanwhile, decides, and is lost."""
    *known, last = entries()
    first.decide(*known)
    first.lapse()
    succession, leading = standby.succession, list[Leadership]()

    class Noted(Leadership):
        def __init__(self, location: Location) -> None:
            super().__init__(location)
            leading.append(self)

    def interrupted(decisions: Any) -> Any:
        if len(leading) == 1:
            leading[0].close()
            first.decide(last)
            first.lapse()
        return succession(decisions)

    monkeypatch.setattr(standby, "Leadership", Noted)
    monkeypatch.setattr(standby, "succession", interrupted)
    seat = wait().taken()
    assert seat.before is not None and len(seat.before.decisions.steps) == len(entries()) - 1


@pytest.mark.nightly
def test_a_log_that_takes_longer_to_read_than_a_lease_lasts_is_read_once(
    first: First, wait: Callable[[], Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    first.decide(*entries())
    first.lapse()
    succession, folded = standby.succession, list[Any]()

    def slow(decisions: Any) -> Any:
        folded.append(decisions)
        threading.Event().wait(first.place.lease_s + 1.5)
        return succession(decisions)

    monkeypatch.setattr(standby, "succession", slow)
    seat = wait().taken()
    assert seat.leadership is not None and len(folded) == 1


def test_the_run_directory_is_the_first_ones_until_another_leads_for_sure(
    first: First, wait: Callable[[], Waiting]
) -> None:
    file = first.run_dir / "coordinator.json"
    file.write_text("the first one's")
    first.decide(*entries())
    first.lapse()
    seat = wait().taken()
    assert file.read_text() == "the first one's" and not seat.holds()
    result = first.run_dir / "exit_code"
    result.write_text("75\n")
    seat.claim()
    assert seat.holds() and str(seat.address) in file.read_text()
    assert not result.exists(), "the job goes on"
