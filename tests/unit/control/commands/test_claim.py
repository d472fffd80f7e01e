# SPDX-License-Identifier: Apache-2.0
"""A run directory is one job's at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.control.commands.contact import Contact
from megatron_resihp.control.commands.launch import claim
from megatron_resihp.control.commands.launch.claim import ClaimedError, Owner, claimed, living_owner, touched
from megatron_resihp.control.transport.access.secret import published_secret
from megatron_resihp.control.transport.address import Address

RACERS = 6


def text(**changes: Any) -> str:
    """A claim of this process, or of another one like it."""
    owner = Owner.this()
    said = {"host": owner.host, "pid": owner.pid, "machine": owner.machine, "started": owner.started}
    return json.dumps(said | changes)


def nobody() -> bool:
    return False


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coordinator.json"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "FRESH_S", 0.3)
    monkeypatch.setattr(claim, "LOOK_S", 0.01)
    monkeypatch.setattr(claim, "TOUCH_S", 0.02)


def test_a_second_launch_is_told_host_and_process(tmp_path: Path) -> None:
    first, second = Contact(Address("127.0.0.1", 1)), Contact(Address("127.0.0.1", 2))
    with first.published(tmp_path):
        with pytest.raises(ClaimedError, match=f"^process {os.getpid()} on {socket.gethostname()}$"):
            second.published(tmp_path).__enter__()
        assert json.loads((tmp_path / "coordinator.json").read_text())["token"] == first.token
        assert living_owner(tmp_path / "coordinator.json") == Owner.this()
    with second.published(tmp_path):
        assert json.loads((tmp_path / "coordinator.json").read_text())["token"] == second.token
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gone", ["no process", "another process has its number", "a zombie"])
def test_what_a_dead_job_of_this_machine_left_is_taken_over_at_once(path: Path, gone: str) -> None:
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    os.waitid(os.P_PID, child.pid or 0, os.WEXITED | os.WNOWAIT)
    if gone != "a zombie":
        child.join()
    changes = {"started": 1} if gone.startswith("another") else {"pid": child.pid, "started": None}
    path.write_text(text(**changes))
    began = time.monotonic()
    with claimed(path, text(), nobody):
        assert path.read_text() == text()
    assert time.monotonic() - began < claim.FRESH_S / 2
    child.join()


@pytest.mark.parametrize("alike", ["host", "machine"])
def test_a_process_of_another_machine_is_believed_if_its_job_answers(path: Path, alike: str) -> None:
    """Whether it lives can't be seen; its number may be that of a process here."""
    path.write_text(text(**{"host": {"machine": "other"}, "machine": {"host": "elsewhere"}}[alike]))
    with pytest.raises(ClaimedError, match=f"process {os.getpid()}"):
        claimed(path, text(), lambda: True).__enter__()


@pytest.mark.usefixtures("hasty")
def test_a_job_of_another_machine_that_does_not_answer_is_given_time(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may just be starting; one that is dead touches nothing any more."""
    path.write_text(text(host="elsewhere"))
    with touched(path), pytest.raises(ClaimedError, match="on elsewhere"):
        claimed(path, text(), nobody).__enter__()
    with claimed(path, text(), nobody):
        assert path.read_text() == text()
    assert (
        f"belonged to process {os.getpid()} on elsewhere 0 s ago; waiting to see whether it still does"
        in capsys.readouterr().out
    )


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("left", ["", "nonsense", "[]", '{"store": "127.0.0.1:1", "token": "x"}'])
def test_a_file_that_names_nobody_is_taken_over_in_time(path: Path, left: str) -> None:
    path.write_text(left)
    with claimed(path, text(), nobody):
        assert path.read_text() == text()


@pytest.mark.usefixtures("hasty")
def test_one_that_is_being_written_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "FRESH_S", 60.0)  # on a busy machine, too
    path.touch()
    written = path.with_name("written")
    written.write_text(text())
    writing = threading.Timer(0.1, written.replace, (path,))
    writing.start()
    with pytest.raises(ClaimedError, match="process"):
        claimed(path, text(), nobody).__enter__()
    writing.join()


def test_who_loses_by_a_moment_is_refused_at_once(path: Path) -> None:
    """Another has written its own file between two looks at that of a dead job."""

    def lost() -> bool:
        path.write_text(text())
        return False

    path.write_text(text(host="elsewhere"))
    began = time.monotonic()
    with pytest.raises(ClaimedError, match=f"process {os.getpid()}"):
        claimed(path, text(), lost).__enter__()
    assert time.monotonic() - began < claim.FRESH_S / 2


def test_what_another_job_has_by_now_is_left_to_it(path: Path) -> None:
    with claimed(path, text(), nobody):
        path.write_text(text(pid=1))
    assert path.read_text() == text(pid=1)


def test_a_coordinator_sees_by_the_run_directory_that_another_has_taken_over(tmp_path: Path) -> None:
    """Not by a file that is missing, or damaged, or of another job: that may be late."""
    contact = Contact(Address("127.0.0.1", 1))
    later, other = (replace(contact, **{name: value}) for name, value in (("store", Address("x", 2)), ("token", "y")))
    file = tmp_path / "coordinator.json"
    for there, followed in ((None, False), (contact, False), (later, True), (other, False)):
        if there is not None:
            file.write_text(there._text)
        assert contact.hold(tmp_path).is_followed() == followed
    file.write_text("{")
    assert not contact.hold(tmp_path).is_followed()


def test_what_another_process_goes_on_with_is_left_to_it(tmp_path: Path) -> None:
    """Although it hasn't come yet."""
    contact = Contact(Address("127.0.0.1", 1))
    for leaves in (True, False):
        holds = contact.hold(tmp_path)
        with contact.taken_over(tmp_path, holds) as take, published_secret(tmp_path, holds):
            take()
            assert holds()
            if leaves:
                holds.leave()
        assert {path.name for path in tmp_path.iterdir()} == ({"coordinator.json", "secret"} if leaves else set())


@pytest.mark.parametrize("left", [None, "a dead job's"])
def test_of_launches_at_the_same_moment_one_gets_it(tmp_path: Path, left: str | None) -> None:
    """All others are refused, and the one's file is whole."""
    context = multiprocessing.get_context("fork")

    def race(path: Path, start: Barrier, won: Any) -> None:
        try:
            start.wait(20.0)
            with claimed(path, text(), nobody):
                with won.get_lock():
                    won.value += 1
                signal.pause()
        except ClaimedError:
            pass

    for turn in range(5):
        path, won, start = tmp_path / f"{turn}.json", context.Value("i", 0), context.Barrier(RACERS)
        if left is not None:
            path.write_text(text(started=1))
        racers = [context.Process(target=race, args=(path, start, won)) for _ in range(RACERS)]
        try:
            for racer in racers:
                racer.start()
            deadline = time.monotonic() + 20.0
            while sum(racer.is_alive() for racer in racers) > 1 and time.monotonic() < deadline:
                time.sleep(0.005)
            owner = living_owner(path)
            assert won.value == 1 and owner is not None
            assert [racer.pid for racer in racers if racer.is_alive()] == [owner.pid]
        finally:
            for racer in racers:
                racer.kill()
                racer.join()
