# SPDX-License-Identifier: Apache-2.0
"""What a coordinator that waits for another's loss takes over, and when: it runs here, and etcd is a real one."""

from __future__ import annotations

import json
import os
import threading
import time
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
from megatron_resihp.control.commands.launch.launch_options import LaunchError, LaunchOptions
from megatron_resihp.control.commands.launch.launcher import NoEvents
from megatron_resihp.control.commands.launch.seat import Seat
from megatron_resihp.control.commands.standby import JobIsOver
from megatron_resihp.control.coordination.decisions.entries import Began, Entry, line_of
from megatron_resihp.control.head.etcd_log import EtcdLog
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.gateway import Gateway, Put
from megatron_resihp.control.transport.etcd.leadership import Leadership
from megatron_resihp.control.transport.etcd.location import Location

pytestmark = needs_etcd

HOST = "127.0.0.1"
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "LOOK_S", 0.02)


@cache
def entries(run: str = "token", until: int | None = 8) -> tuple[Entry, ...]:
    """Of a job one of whose workers has just died. `until`: how many there are; None: it has ended."""
    began, *steps = run_until(until)[0]
    assert isinstance(began, Began)
    return replace(began, run=run), *steps


class First:
    """A coordinator, as far as etcd and the run directory know of it.

    Args:
        run: the run's token.
        nodes: that hold leases.
        apart: it is not in the launch of a node.
    """

    def __init__(
        self, place: Location, run_dir: Path, run: str = "token", nodes: tuple[int, ...] = (0,), apart: bool = True
    ) -> None:  # fmt: skip
        self.place, self.run_dir = place, run_dir
        self.file = run_dir / "coordinator.json"
        self.file.write_text(json.dumps({"store": f"{HOST}:1", "token": run, "apart": apart}))
        (run_dir / "secret").write_text("a secret of this job\n")
        self._leadership = Leadership(place)
        self._log = EtcdLog(self._leadership, threading.Event(), run)
        with closing(Gateway(place)) as gateway:
            self.lease_of_nodes = gateway.grant(300)
            for node in nodes:
                self.put(place.present(run), node, self.lease_of_nodes)

    def put(self, keys: str, node: int, lease: int = 0) -> None:
        with closing(Gateway(self.place)) as gateway:
            gateway.transact({}, Put(f"{keys}{node}", str(node).encode(), lease), ())

    def decide(self, *decided: Entry) -> None:
        """It leads again, if its lease has lapsed and no other leads."""
        for entry in decided:
            self._log.write([line_of(entry)])

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


class Events(NoEvents):
    """Of a coordinator that waits. `are_its_own`: no other may write them any more."""

    are_its_own = False

    def take_over(self) -> None:
        self.are_its_own = True


class Waiting:
    """A coordinator that waits, in a thread, for the loss of another."""

    def __init__(self, place: Location, run_dir: Path, patience_s: float) -> None:
        self._options = LaunchOptions(
            (), nodes=SIZE.nodes, alone=True, standby=True, control=place, coordinator=Address(HOST, 0),
            run_dir=run_dir, connect_timeout_s=patience_s,
        )  # fmt: skip
        self._stack = ExitStack()
        self.seat: Seat | None = None
        self.ended: Exception | None = None
        self.events = Events()
        self._thread = threading.Thread(target=self._take_over)
        self._thread.start()

    def _take_over(self) -> None:
        try:
            self.seat = standby.take_over(self._options, lambda run_dir: self.events, self._stack)
        except Exception as error:
            self.ended = error

    def taken(self) -> Seat:
        """Where it sits once it has taken over."""
        eventually("it takes over", lambda: self.seat or self.ended)
        assert self.seat is not None, self.ended
        return self.seat

    def refusal(self) -> Exception:
        """Why it doesn't."""
        eventually("it ends", lambda: self.seat or self.ended)
        assert self.ended is not None
        return self.ended

    def close(self) -> None:
        self._thread.join()
        self._stack.close()


@pytest.fixture
def wait(place: Location, tmp_path: Path) -> Iterator[Callable[..., Waiting]]:
    made: list[Waiting] = []

    def start(patience_s: float = PATIENCE_S) -> Waiting:
        made.append(Waiting(replace(place, lease_s=2), tmp_path, patience_s))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_what_is_decided_while_it_reads_is_not_lost(
    first: First, wait: Callable[..., Waiting], monkeypatch: pytest.MonkeyPatch
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
    first: First, wait: Callable[..., Waiting], monkeypatch: pytest.MonkeyPatch
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
    first: First, wait: Callable[..., Waiting]
) -> None:
    file, said = first.file, first.file.read_text()
    first.decide(*entries())
    first.lapse()
    waiting = wait()
    seat = waiting.taken()
    assert file.read_text() == said and not seat.holds() and not waiting.events.are_its_own
    result = first.run_dir / "exit_code"
    result.write_text("75\n")
    seat.claim()
    assert seat.holds() and str(seat.address) in file.read_text()
    assert waiting.events.are_its_own
    assert not result.exists(), "the job goes on"


class TestBefore:
    """One that is started with its job's coordinator, or before it, where another job has had its name in etcd."""

    @pytest.fixture
    def short(self, place: Location) -> Location:
        return replace(place, lease_s=2)

    @pytest.fixture(
        params=[
            "that was lost whole",
            *(
                pytest.param(each, marks=pytest.mark.nightly)
                for each in ("none", "that was lost whole, and its nodes could not reach etcd", "that has ended")
            ),
        ]
    )
    def earlier(self, request: pytest.FixtureRequest, short: Location, tmp_path: Path) -> str:
        """The job before."""
        name: str = request.param
        if name != "none":
            with closing(First(short, tmp_path, nodes=())) as before:
                before.decide(*entries(until=None if "ended" in name else 8))
                if "nodes could" not in name:
                    for node in range(SIZE.nodes):
                        before.put(short.known("token"), node)
            if "ended" in name:
                before.file.unlink()
        return name

    def test_waits_for_its_own(
        self, earlier: str, short: Location, tmp_path: Path, wait: Callable[..., Waiting],
        capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(standby, "age", lambda path: 3600.0)
        waiting = wait()
        said = "leads or is lost; waits for one, 20 s at most"
        eventually("it says so", lambda: said in capfd.readouterr().out)
        time.sleep(0.2)
        with closing(First(short, tmp_path, "later")) as own:
            eventually("it sees that one", lambda: "waits until the coordinator of" in capfd.readouterr().out)
            own.decide(*entries("later"))
            own.lapse()
            seat = waiting.taken()
            assert seat.token == "later" and seat.before is not None

    @pytest.mark.nightly
    def test_waits_no_longer_than_it_may(self, earlier: str, wait: Callable[..., Waiting]) -> None:
        refusal = wait(patience_s=0.3).refusal()
        assert isinstance(refusal, LaunchError)
        assert "has come within 0.3 s; check --control and --run-dir, or give a longer --connect-timeout" in str(
            refusal
        )


@pytest.mark.parametrize(("silent_s", "taken"), [(2.0, False), (30.0, True), (300.0, False)])
def test_nodes_that_cannot_reach_etcd_may_wait_for_it(
    first: First, wait: Callable[..., Waiting], monkeypatch: pytest.MonkeyPatch, silent_s: float, taken: bool
) -> None:
    """As long as the coordinator's file has been touched not long ago; who still touches it lives."""
    monkeypatch.setattr(standby, "age", lambda path: silent_s)
    first.decide(*entries())
    with closing(Gateway(first.place)) as gateway:
        gateway.revoke(first.lease_of_nodes)
    first.lapse()
    waiting = wait(patience_s=PATIENCE_S if taken else 0.3)
    assert waiting.taken() if taken else waiting.refusal()


def test_an_end_that_nodes_wait_to_be_told_of_is_taken_over(first: First, wait: Callable[..., Waiting]) -> None:
    """The coordinator was lost in between."""
    first.decide(*entries(until=None))
    first.lapse()
    seat = wait().taken()
    assert seat.before is not None and seat.before.end is not None and seat.before.end.code == 0


def test_an_end_that_nobody_waits_for_is_not(
    first: First, wait: Callable[..., Waiting], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where nodes can't reach etcd, that is known only once the coordinator's file has not been touched for long."""
    silent_s = [2.0]
    monkeypatch.setattr(standby, "age", lambda path: silent_s[0])
    waiting = wait()
    eventually("it waits", lambda: "waits until the coordinator of" in capfd.readouterr().out)
    with closing(Gateway(first.place)) as gateway:
        gateway.revoke(first.lease_of_nodes)
    first.decide(*entries(until=None))
    first.lapse()
    time.sleep(0.5)
    assert waiting.ended is None and waiting.seat is None, "it looks again"
    silent_s[0] = 300.0
    refusal = waiting.refusal()
    assert isinstance(refusal, JobIsOver) and refusal.code == 0


def test_it_ends_with_the_job_that_it_waits_for(
    first: First, wait: Callable[..., Waiting], capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = wait()
    eventually("it waits", lambda: "waits until the coordinator of" in capfd.readouterr().out)
    first.decide(*entries(until=None))
    first.file.unlink()
    first.lapse()
    refusal = waiting.refusal()
    assert isinstance(refusal, JobIsOver) and refusal.code == 0


def test_one_that_is_in_a_launch_cannot_be_followed(
    place: Location, tmp_path: Path, wait: Callable[..., Waiting], capfd: pytest.CaptureFixture[str]
) -> None:
    """This is said while it lives. The file of one that was killed is not touched any more, and means nothing."""
    with closing(First(replace(place, lease_s=20), tmp_path, apart=False)) as first:
        waiting = wait()
        eventually("it waits", lambda: "waits until the coordinator of" in capfd.readouterr().out)
        time.sleep(0.2)
        assert waiting.ended is None, "another one may be about to come"
        os.utime(first.file, (0.0, first.file.stat().st_mtime + 5.0))
        refusal = waiting.refusal()
    assert isinstance(refusal, LaunchError) and "which is in node 0's launch; launch node 0 without" in str(refusal)


def test_the_file_of_one_that_was_in_a_launch_before_means_nothing(
    place: Location, tmp_path: Path, wait: Callable[..., Waiting], capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(First(replace(place, lease_s=20), tmp_path, "earlier", apart=False)):
        waiting = wait()
        eventually("it waits", lambda: "waits until the coordinator of" in capfd.readouterr().out)
    with closing(First(replace(place, lease_s=2), tmp_path)) as first:
        first.decide(*entries())
        time.sleep(0.2)
        first.lapse()
        assert waiting.taken().token == "token"
