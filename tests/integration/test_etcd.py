# SPDX-License-Identifier: Apache-2.0
"""Decisions in a real etcd: one leader at a time, a log that is whole, and jobs that wait for it."""

from __future__ import annotations

import base64
import hashlib
import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from etcds import Etcd, needs_etcd
from jobs import Jobs, tiny
from launched import Launched, eventually

from megatron_resihp.cli import main
from megatron_resihp.control import exit_codes
from megatron_resihp.control.coordination.actions import Limits
from megatron_resihp.control.coordination.decisions.entries import Began, CoordinatorFailed, Snapshot, Step, line_of
from megatron_resihp.control.coordination.decisions.plain_state import plain_state
from megatron_resihp.control.coordination.decisions.reading import UnusableError
from megatron_resihp.control.coordination.decisions.recorded import Recorded, UnrecordedError
from megatron_resihp.control.head import etcd_log
from megatron_resihp.control.head.decision_logs import decisions_at
from megatron_resihp.control.head.etcd_log import EtcdLog, read_etcd_decisions
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.gateway import EtcdError, Gateway, Outcome, Put, UnreachableError
from megatron_resihp.control.transport.etcd.leadership import DeposedError, Leadership
from megatron_resihp.control.transport.etcd.location import LEASE_S, Location
from megatron_resihp.control.transport.etcd.presence import Gone, NodeLeases, Presence
from megatron_resihp.control.worker.saved_state import newest_state
from megatron_resihp.protocol.wire import MalformedError
from megatron_resihp.version import __version__

pytestmark = needs_etcd

WAIT_S = 20.0
BEGAN = Began(__version__, JobSize(1, 2), Limits())


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts launchers of jobs with different run directories that don't outlive the test."""
    started: list[Launched] = []

    def start(**options: Any) -> Launched:
        run_dir = tmp_path / f"run{len(started)}"
        run_dir.mkdir()
        started.append(Launched(run_dir, **{"workers_per_node": 2, **options}))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def short(place: Location) -> Location:
    """With the shortest lease that etcd grants."""
    return replace(place, lease_s=2)


def unexpected(error: EtcdError) -> None:
    """Where a leader is not to be deposed."""
    pytest.fail(str(error))


def step(number: int, said: str = "", characters: int = 0) -> Step:
    """One that takes more than half as many bytes as so many characters, however it is compressed."""
    random = tuple(hashlib.sha256(str(n).encode()).hexdigest() for n in range(characters // 64))
    return Step(number, 1000.0 + number, CoordinatorFailed(said, False), actions=random)


def snapshot(number: int) -> Snapshot:
    """After so many steps."""
    state = plain_state(Recorded(BEGAN.size, BEGAN.limits).state)
    return Snapshot(BEGAN, number, 1000.0 + number, state, 1001.0, (), (), (), ((),), ())


def keys_in(place: Location) -> list[str]:
    """Of the log's entries, and of their pieces."""
    with closing(Gateway(place)) as gateway:
        return [held.key for keys in place.log_before(999_999_999) for held in gateway.all(*keys)]


@pytest.fixture
def short_log(place: Location, monkeypatch: pytest.MonkeyPatch) -> Iterator[EtcdLog]:
    """One that a few lines make long."""
    monkeypatch.setattr(etcd_log, "LONG", 100)
    monkeypatch.setattr(etcd_log, "TIMES", 0)
    monkeypatch.setattr(etcd_log, "AGAIN_S", 0.0)
    with closing(Leadership(place)) as leader, closing(log_of(leader)) as log:
        yield log


def log_of(leader: Leadership) -> EtcdLog:
    return EtcdLog(leader, threading.Event(), "token")


def lapse(leader: Leadership, gateway: Gateway) -> None:
    """As if it had not been heard of for too long."""
    gateway.revoke(leader._lease)


@pytest.mark.nightly
class TestPresence:
    def test_nodes_are_gone_whose_leases_are(self, short: Location) -> None:
        present, lost = Presence(1, 7), Put(f"{short.known('token')}3", b"2")
        with closing(Gateway(short)) as gateway, closing(present):
            gateway.transact({}, lost, ())
            present.begin(str(short), "token")
            now = time.monotonic()
            leases, others = (NodeLeases(short, run, Gone({1, 2}, now), WAIT_S) for run in ("token", "else"))
            with closing(leases), closing(others):
                eventually("one is gone", leases.gone)
                assert leases.gone() == {2} and not others.gone(), "of another run nothing is known"
            held = gateway.get(f"{short.present('token')}7")
            assert held is not None
            gateway.revoke(held.lease)
            eventually("it holds another", lambda: gateway.get(held.key) not in (None, held))

    def test_a_node_that_ends_lets_go(self, short: Location) -> None:
        with closing(Gateway(short)) as gateway:
            with closing(Presence(0, 0)) as ends:
                ends.begin(str(short), "token")
                eventually("it is there", lambda: gateway.get(f"{short.present('token')}0"))
            assert gateway.get(f"{short.present('token')}0") is None

    def test_one_that_cannot_reach_etcd_says_so_once(self, capfd: pytest.CaptureFixture[str]) -> None:
        with closing(Presence(4, 8)) as cut_off:
            cut_off.begin("etcd://127.0.0.1:1/run?lease=2", "token")
            time.sleep(1.5)
        said = capfd.readouterr().err
        assert said.count("node 4 holds no lease there: if it is lost with the coordinator, the next one waits") == 1


class TestLeadership:
    @pytest.mark.nightly
    def test_there_is_one_at_a_time(self, short: Location) -> None:
        said = re.escape(f"{short} is led by process {os.getpid()} on ")
        with closing(Leadership(short)) as first:
            first.keep(unexpected)
            with pytest.raises(DeposedError, match=said):
                Leadership(short)
        with closing(Leadership(short)) as second:
            assert second.token > first.token

    def test_one_that_is_killed_is_followed_once_its_lease_has_lapsed(self, short: Location) -> None:
        token = Leadership(short).token
        with closing(Leadership(short)) as second:
            assert second.token > token

    def test_a_lease_is_kept_alive(self, short: Location) -> None:
        with closing(Leadership(short)) as kept:
            kept.keep(unexpected)
            token = kept.token
            time.sleep(2.5)
            held = kept.gateway().get(short.leader)
            assert held is not None and held.created == token == kept.token

    def test_one_whose_lease_has_lapsed_leads_again(self, short: Location) -> None:
        with closing(Leadership(short)) as lapsed:
            token = lapsed.token
            lapse(lapsed, lapsed.gateway())
            lapsed.keep(unexpected)
            eventually("it leads again", lambda: lapsed.token > token)

    def test_unless_another_leads(self, short: Location) -> None:
        with closing(Leadership(short)) as lapsed:
            lapse(lapsed, lapsed.gateway())
            told = queue.SimpleQueue[EtcdError]()
            with closing(Leadership(short)) as other:
                other.keep(unexpected)
                lapsed.keep(told.put)
                error = told.get(timeout=WAIT_S)
                lapsed.keep(told.put)
                assert isinstance(error, DeposedError) and told.get(timeout=WAIT_S) is error, "who asks later, too"

    def test_nor_where_another_has_taken_over(self, short: Location) -> None:
        """Which isn't seen in etcd, as that one's lease has lapsed, too."""
        with closing(Leadership(short)) as lapsed:
            lapse(lapsed, lapsed.gateway())
            told = queue.SimpleQueue[EtcdError]()
            lapsed.keep(told.put, lambda: True)
            assert str(told.get(timeout=WAIT_S)) == f"another has taken over {short}: its lease has lapsed"

    @pytest.mark.nightly
    def test_one_that_etcd_is_out_of_reach_for_looks_elsewhere_whether_it_leads(
        self, short: Location, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unreachable(self: Gateway, lease: int) -> None:
            raise UnreachableError("etcd doesn't answer")

        monkeypatch.setattr(Gateway, "keep_alive", unreachable)
        taken_over, told = threading.Event(), queue.SimpleQueue[EtcdError]()
        with closing(Leadership(short)) as cut_off:
            cut_off.keep(told.put, taken_over.is_set)
            time.sleep(2.0)
            assert told.empty(), "as long as no other leads it goes on"
            taken_over.set()
            error = told.get(timeout=WAIT_S)
        assert str(error) == f"another has taken over {short}: etcd has been out of reach"

    def test_an_answer_that_is_lost_is_asked_for_again(self, place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
        transact = Gateway.transact

        def twice(self: Gateway, *asked: Any) -> Outcome:
            assert transact(self, *asked).succeeded
            return transact(self, *asked)

        monkeypatch.setattr(Gateway, "transact", twice)
        with closing(Leadership(place)) as leader:
            held = leader.gateway().get(place.leader)
            assert held is not None and (held.created, held.lease) == (leader.token, leader._lease)


class TestLog:
    def test_holds_what_was_written(self, place: Location) -> None:
        """Also what is larger than etcd takes at once."""
        large = step(2, characters=3_000_000)
        with closing(Leadership(place)) as leader, closing(log_of(leader)) as log:
            for entry in (BEGAN, step(1), large, step(3)):
                log.write([line_of(entry)])
            held = leader.gateway().get(place.entry(3))
            assert held is not None and held.value.startswith(b"pieces 4 ")
        read = read_etcd_decisions(place)
        assert (read.began, read.steps, read.problem) == (BEGAN, (step(1), large, step(3)), "")

    def test_what_is_decided_at_once_is_one_entry(self, place: Location) -> None:
        steps = tuple(map(step, range(1, 1000)))
        with closing(Leadership(place)) as leader, closing(log_of(leader)) as log:
            log.write([line_of(BEGAN)])
            log.write([line_of(each) for each in steps])
            assert len(list(leader.gateway().all(*place.entries))) == 2
        read = read_etcd_decisions(place)
        assert (read.steps, read.problem, read.last) == (steps, "", 2)

    def test_a_run_that_begins_ends_the_log_of_those_before(self, place: Location) -> None:
        """At once: there is no moment at which etcd has neither."""
        later = step(1, "later", characters=1_200_000)
        nodes = [f"{place.known(run)}3" for run in ("earlier", "token", "zeroth")]
        with closing(Gateway(place)) as gateway:
            for node in nodes:
                gateway.transact({}, Put(node, b"1"), ())
        for entries in ([BEGAN, step(1, characters=1_200_000), step(2)], [BEGAN, later]):
            with closing(Leadership(place)) as leader, closing(log_of(leader)) as log:
                for entry in entries:
                    log.write([line_of(entry)])
        assert read_etcd_decisions(place).steps == (later,)
        with closing(Gateway(place)) as gateway:
            assert [held.key for held in gateway.all(*place.entries)] == [place.entry(4), place.entry(5)]
            pieces = [held.key for held in gateway.all(f"{place.run}/pieces/", f"{place.run}/pieces0")]
            assert pieces == [place.piece(5, 0), place.piece(5, 1)]
            assert [held.key for held in gateway.all(f"{place.run}/known/", f"{place.run}/known0")] == nodes[1:2]

    def test_long_ones_are_read_page_by_page(self, place: Location) -> None:
        steps = tuple(map(step, range(1, 80)))
        with closing(Leadership(place)) as leader, closing(log_of(leader)) as log:
            for entry in (BEGAN, *steps):
                log.write([line_of(entry)])
        assert read_etcd_decisions(place).steps == steps

    def test_an_answer_that_is_lost_makes_no_second_entry(
        self, place: Location, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of none of the pieces either."""
        large = step(1, characters=1_200_000)
        transact = Gateway.transact
        lost: list[str] = []

        def once(self: Gateway, created: dict[str, int], put: Put, *asked: Any) -> Outcome:
            outcome = transact(self, created, put, *asked)
            if put.key not in lost:
                lost.append(put.key)
                raise UnreachableError("the answer is lost")
            return outcome

        monkeypatch.setattr(etcd_log, "RETRY_S", 0.01)
        with closing(Leadership(place)) as leader, closing(log_of(leader)) as log:
            monkeypatch.setattr(Gateway, "transact", once)
            for entry in (BEGAN, large, step(2)):
                log.write([line_of(entry)])
        assert len(lost) == 5
        read = read_etcd_decisions(place)
        assert (read.steps, read.problem) == ((large, step(2)), "")
        assert len(list(Gateway(place).all(*place.entries))) == 3

    def test_who_leads_no_more_writes_nothing(self, place: Location) -> None:
        with closing(Leadership(place)) as deposed, closing(log_of(deposed)) as log:
            log.write([line_of(BEGAN)])
            lapse(deposed, deposed.gateway())
            said = f"{place} is led by process"
            with closing(Leadership(place)), pytest.raises(UnrecordedError, match=said):
                log.write([line_of(step(1))])
        assert read_etcd_decisions(place).steps == ()

    def test_who_leads_again_writes_on(self, place: Location) -> None:
        with closing(Leadership(place)) as lapsed, closing(log_of(lapsed)) as log:
            log.write([line_of(BEGAN)])
            lapse(lapsed, lapsed.gateway())
            log.write([line_of(step(1))])
        assert read_etcd_decisions(place).steps == (step(1),)

    def test_unless_another_has_written_meanwhile(self, place: Location) -> None:
        with closing(Leadership(place)) as lapsed, closing(log_of(lapsed)) as log:
            log.write([line_of(BEGAN)])
            lapse(lapsed, lapsed.gateway())
            with closing(Leadership(place)) as other, closing(log_of(other)) as others:
                others.write([line_of(BEGAN)])
            with pytest.raises(UnrecordedError, match="has decisions of another job since this one has led it"):
                log.write([line_of(step(1))])
        assert read_etcd_decisions(place).steps == ()

    def test_nor_where_what_another_has_written_is_gone(self, place: Location) -> None:
        """A third job has begun since then, and has ended: the next number is free again."""
        with closing(Leadership(place)) as lapsed, closing(log_of(lapsed)) as log:
            log.write([line_of(BEGAN)])
            lapse(lapsed, lapsed.gateway())
            for others in ([BEGAN, step(1)], [BEGAN]):
                with closing(Leadership(place)) as other, closing(log_of(other)) as written:
                    for entry in others:
                        written.write([line_of(entry)])
            with pytest.raises(UnrecordedError, match="has decisions of another job since this one has led it"):
                log.write([line_of(step(1))])
        assert read_etcd_decisions(place).steps == ()

    def test_who_takes_over_writes_nothing_where_more_was_decided_than_it_has_read(self, place: Location) -> None:
        with closing(Leadership(place)) as first, closing(log_of(first)) as log:
            log.write([line_of(BEGAN)])
            lapse(first, first.gateway())
            with closing(Leadership(place)) as second:
                read = read_etcd_decisions(place)
                lapse(second, second.gateway())
                log.write([line_of(step(1))])
                lapse(first, first.gateway())
                later = EtcdLog(second, threading.Event(), "token", read.last)
                with closing(later), pytest.raises(UnrecordedError, match="has decisions of another job"):
                    later.write([line_of(step(1, "without it"))])
        assert read_etcd_decisions(place).steps == (step(1),)

    def test_a_snapshot_takes_the_place_of_what_it_stands_for(self, short_log: EtcdLog, place: Location) -> None:
        large = step(2, characters=1_200_000)
        for entry in (BEGAN, step(1), large):
            short_log.write([line_of(entry)])
        short_log.shorten(lambda: line_of(snapshot(2)))
        short_log.write([line_of(step(3))])
        read = read_etcd_decisions(place)
        assert (read.start, read.began, read.steps, read.problem) == (snapshot(2), BEGAN, (step(3),), "")
        assert keys_in(place) == [place.entry(4), place.entry(5)], "also the pieces of the large one are gone"

    def test_a_log_that_is_not_long_is_left(self, place: Location) -> None:
        with closing(Leadership(place)) as leader, closing(log_of(leader)) as log:
            log.write([line_of(BEGAN), line_of(step(1))])
            log.shorten(lambda: pytest.fail("no snapshot is needed"))

    def test_a_log_stays_whose_snapshot_can_not_be_read_back(
        self, short_log: EtcdLog, place: Location, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def unreadable() -> str:
            raise MalformedError("a decision has too many characters")

        for entry in (BEGAN, step(1)):
            short_log.write([line_of(entry)])
        short_log.shorten(unreadable)
        short_log.write([line_of(step(2))])
        short_log.shorten(lambda: pytest.fail("one line says so, not one a minute"))
        assert read_etcd_decisions(place).steps == (step(1), step(2))
        assert "can't be shortened: a decision has too many characters" in capsys.readouterr().err

    def test_a_snapshot_whose_answer_is_lost_is_there_once(
        self, short_log: EtcdLog, place: Location, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The job goes on without an answer; before the next decision it is found out."""
        short_log.write([line_of(BEGAN)])
        transact = Gateway.transact
        for number, made in ((1, True), (2, False)):
            short_log.write([line_of(step(number))])

            def lost(self: Gateway, *asked: Any, made: bool = made) -> Outcome:
                if made:
                    transact(self, *asked)
                raise UnreachableError("no answer")

            with monkeypatch.context() as patch:
                patch.setattr(Gateway, "transact", lost)
                short_log.shorten(lambda number=number: line_of(snapshot(number)))  # type: ignore[misc]
            short_log.shorten(lambda: pytest.fail("that one comes first"))
        short_log.write([line_of(step(3))])
        read = read_etcd_decisions(place)
        assert (read.start, read.steps, read.problem) == (snapshot(2), (step(3),), "")
        assert len(keys_in(place)) == 2

    def test_who_is_deposed_leaves_what_others_have_decided(self, short_log: EtcdLog, place: Location) -> None:
        short_log.write([line_of(BEGAN)])
        short_log.write([line_of(step(1))])
        leader = short_log._leadership
        lapse(leader, leader.gateway())
        with closing(Leadership(place)) as other:
            read = read_etcd_decisions(place)
            with closing(EtcdLog(other, threading.Event(), "token", read.last)) as others:
                others.write([line_of(step(2))])
                with pytest.raises(UnrecordedError):
                    short_log.shorten(lambda: line_of(snapshot(1)))
        assert read_etcd_decisions(place).steps == (step(1), step(2))

    def test_who_takes_over_a_long_log_shortens_it(self, short_log: EtcdLog, place: Location) -> None:
        short_log.write([line_of(BEGAN)])
        short_log.write([line_of(step(1, characters=10_000))])
        lapse(short_log._leadership, short_log._leadership.gateway())
        read = read_etcd_decisions(place)
        with ExitStack() as stack:
            leader = stack.enter_context(closing(Leadership(place)))
            later = EtcdLog(leader, threading.Event(), "token", read.last, read.characters)
            log = stack.enter_context(closing(later))
            log.write([line_of(step(2))])
            log.shorten(lambda: line_of(snapshot(2)))
        assert read_etcd_decisions(place).start == snapshot(2)

    @pytest.mark.nightly
    def test_etcd_does_not_grow_with_the_length_of_a_run(
        self, short_log: EtcdLog, place: Location, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of decisions some 150 MB, after compression, pass through it."""
        monkeypatch.setattr(etcd_log, "LONG", 10_000_000)
        short_log.write([line_of(BEGAN)])
        for number in range(1, 306):
            short_log.write([line_of(step(number, characters=1_000_000))])
            short_log.shorten(lambda number=number: line_of(snapshot(number)))  # type: ignore[misc]
        read = read_etcd_decisions(place)
        assert read.problem == "" and read.steps[-1].number == 305 and len(read.steps) < 11
        with closing(Gateway(place)) as gateway:
            size = int(gateway._post("maintenance/status", {})["dbSize"])
        assert size < 50_000_000, f"{size / 1e6:.0f} MB"

    @pytest.mark.nightly
    def test_who_gets_no_answer_waits_and_gives_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """etcd keeps what it had when it was killed."""
        with closing(Etcd(tmp_path)) as etcd, closing(Leadership(etcd.location())) as leader:
            with closing(log_of(leader)) as log:
                log.write([line_of(BEGAN)])
                etcd.kill(0)
                starter = threading.Timer(1.0, etcd.start, (0,))
                starter.start()
                log.write([line_of(step(1))])
                starter.join()
                etcd.kill(0)
                monkeypatch.setattr(etcd_log, "PATIENCE_S", 0.2)
                with pytest.raises(UnrecordedError, match="nothing could be decided for 0 s: etcd doesn't answer"):
                    log.write([line_of(step(2))])
            etcd.start(0)
            assert read_etcd_decisions(etcd.location()).steps == (step(1),)

    def test_nobody_waits_once_the_job_is_over(self, place: Location) -> None:
        over = threading.Event()
        over.set()
        with closing(Leadership(place)) as leader, closing(EtcdLog(leader, over, "token")) as log:
            log._gateway = Gateway(Location((Address("127.0.0.1", 1),), "run"))
            with pytest.raises(UnrecordedError, match="the job is over"):
                log.write([line_of(BEGAN)])

    def test_what_is_damaged_is_named(self, place: Location) -> None:
        large = step(2, characters=1_200_000)
        with closing(Leadership(place)) as leader, closing(log_of(leader)) as log:
            for entry in (BEGAN, step(1), large, step(3)):
                log.write([line_of(entry)])
            gateway = leader.gateway()
            for piece, said in ((b"other", "its pieces are not those that were written"), (None, "its piece 1 is")):
                key = place.piece(3, 1)
                if piece is None:
                    gateway._post("kv/deleterange", {"key": base64.b64encode(key.encode()).decode()})
                else:
                    gateway.transact({}, Put(key, piece), [])
                read = read_etcd_decisions(place)
                assert read.steps == (step(1),) and f"{place}: entry 3 is damaged: {said}" in read.problem
            gateway.transact({}, Put(place.entry(2), b"nothing that was compressed"), [])
            assert f"{place}: entry 2 is damaged: Error -3" in read_etcd_decisions(place).problem

    def test_there_may_be_none(self, place: Location) -> None:
        with pytest.raises(UnusableError, match=f"{place} holds no decisions: its job has not begun"):
            read_etcd_decisions(place)


def refusal(run: Launched) -> str:
    """What a launcher that begins nothing says."""
    assert run.end() == exit_codes.REFUSED
    [line] = run.output().splitlines()
    return line


@contextmanager
def led_by_another(place: Location, launcher: int) -> Iterator[None]:
    """While it is stopped its lease lapses."""
    os.kill(launcher, signal.SIGSTOP)
    gateway = Gateway(place)
    held = gateway.get(place.leader)
    assert held is not None
    gateway.revoke(held.lease)
    with closing(Leadership(place)):
        os.kill(launcher, signal.SIGCONT)
        yield


def deciding(run: Launched) -> list[int]:
    """Wait for epoch 0; the workers' processes."""
    run.await_event("epoch_started", epoch=0)
    return [run.worker_pid(worker) for worker in range(2)]


class TestJob:
    def test_what_it_decides_is_in_etcd_as_in_the_run_directory(
        self,
        place: Location,
        launch: Callable[..., Launched],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        place = replace(place, lease_s=3)
        run = launch(control=place)
        pids = deciding(run)
        again = refusal(launch(control=place))
        assert f"resihp: {place} is led by process {run.pid} on " in again and "; check --control" in again
        os.kill(pids[1], signal.SIGKILL)
        run.await_event("recovery", to_epoch=1)
        run.ask("finish")
        assert run.end() == 0, run.output()
        assert Gateway(place).get(place.leader) is None, "another may lead at once"
        assert decisions_at(str(place)) == decisions_at(str(run.run_dir))
        assert main(["replay", str(run.run_dir)]) == 0
        from_file = capsys.readouterr()
        assert main(["replay", str(place)]) == 0
        assert capsys.readouterr() == from_file and "EpochIsBroken" in from_file.out

    def test_nothing_is_begun_where_nothing_could_be_decided(self, launch: Callable[..., Launched]) -> None:
        nobody = Location((Address("127.0.0.1", 1), Address("127.0.0.1", 2)), "run")
        said = refusal(launch(control=nobody))
        assert "resihp: etcd doesn't answer (127.0.0.1:1: [Errno 111] Connection refused; 127.0.0.1:2: " in said

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            ('{"etcdserver": "3.3.27", "etcdcluster": "3.3.0"}', "is 3.3, and 3.4 is needed; check"),
            ('{"name": "somebody"}', "is not etcd; check"),
            ("<html>", "what answers is not etcd"),
        ],
    )
    def test_an_etcd_that_is_too_old_is_refused(self, launch: Callable[..., Launched], answer: str, said: str) -> None:
        with answering(answer) as port:
            assert said in refusal(launch(control=Location((Address("127.0.0.1", port),), "run")))

    def test_a_new_cluster_is_waited_for_until_it_knows_its_version(self) -> None:
        new = '{"etcdserver": "3.5.16", "etcdcluster": "3.0.0"}'
        with answering(new, new, '{"etcdserver": "3.5.16", "etcdcluster": "3.5.0"}') as port:
            Gateway(Location((Address("127.0.0.1", port),), "run")).check_version()

    @pytest.mark.nightly
    def test_ends_where_another_leads(
        self, place: Location, launch: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = replace(place, lease_s=3)
        run = launch(control=place)
        deciding(run)
        with led_by_another(place, run.pid):
            assert run.end() == exit_codes.RETRY
        said = f"the coordinator is lost: {place} is led by process {os.getpid()} on {socket.gethostname()}"
        [line] = [line for line in run.output().splitlines() if line.startswith("resihp: ended")]
        assert line == f"resihp: ended with exit code 75: {said}" and "Traceback" not in run.output()

    @pytest.mark.nightly
    @pytest.mark.parametrize("apart", [True, False])
    def test_one_that_may_be_followed_leaves_what_the_next_one_needs(
        self, place: Location, launch: Callable[..., Launched], apart: bool
    ) -> None:
        """The job goes on, as far as it knows. Without one that may follow the job is over."""
        run = launch(control=replace(place, lease_s=2), alone=apart, coordinator=Address("127.0.0.1", 0))
        eventually("it serves", lambda: (run.run_dir / "decisions.jsonl").exists())
        with led_by_another(place, run.pid):
            assert run.end() == exit_codes.RETRY
        names = {path.name for path in run.run_dir.iterdir()}
        assert ({"coordinator.json", "secret"} <= names) == apart == ("exit_code" not in names), names
        assert bool(run.events("run_finished")) != apart

    @pytest.mark.nightly
    def test_a_member_dies_and_then_all_are_away_for_a_while(
        self, tmp_path: Path, launch: Callable[..., Launched]
    ) -> None:
        with closing(Etcd(tmp_path, 3)) as etcd:
            run = launch(control=etcd.location(), workers_per_node=4)
            pids = deciding(run)
            etcd.kill(0)
            os.kill(pids[1], signal.SIGKILL)
            run.await_event("recovery", to_epoch=1)
            etcd.kill(1, 2)
            os.kill(run.process_of(2), signal.SIGKILL)
            eventually("the lease lapses", lambda: "until there is something to decide" in run.output())
            time.sleep(LEASE_S)
            assert [event["dead"] for event in run.events("worker_dead")] == [1], "nothing is decided without etcd"
            etcd.start(1, 2)
            run.await_event("recovery", to_epoch=2)
            eventually("that is told", lambda: "resihp: etcd answers again, after " in run.output())
            run.ask("finish")
            assert run.end() == 0, run.output()
            assert decisions_at(str(etcd.location())) == decisions_at(str(run.run_dir))

    @pytest.mark.nightly
    def test_waits_no_longer_than_that(
        self, tmp_path: Path, launch: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(etcd_log, "PATIENCE_S", 3.0)
        with closing(Etcd(tmp_path)) as etcd:
            run = launch(control=etcd.location(), workers_per_node=3)
            pids = deciding(run)
            etcd.pause(0)
            os.kill(pids[1], signal.SIGKILL)
            assert run.end() == exit_codes.RETRY
        said = run.output()
        assert "exit code 75: the coordinator is lost: nothing could be decided for 3 s: etcd doesn't answer (" in said
        assert "Traceback" not in said and not run.events("worker_dead")


@pytest.mark.nightly
def test_what_was_trained_is_saved_where_another_leads(place: Location, jobs: Jobs) -> None:
    """By workers that have lost the coordinator."""
    job = jobs.start(tiny(train_iters=400), workers=2, control=str(place))
    job.await_event("iteration", iteration=5)
    assert job.pid is not None
    with led_by_another(place, job.pid):
        assert job.wait().code == exit_codes.RETRY, job.tails()
    assert job.output().count("all of it; go on from it with --load") == 1, job.output()
    found = newest_state(job.run_dir)
    assert found is not None and found[1] >= 5


@contextmanager
def answering(*texts: str) -> Iterator[int]:
    """A server that gives these answers, and the last of them from then on; its port."""
    left = list(texts)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write((left.pop(0) if left[1:] else left[0]).encode())

        def log_message(self, *said: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
