# SPDX-License-Identifier: Apache-2.0
"""How a node that waits to join a job finds that there is none to join any more, and how one that can't join leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from served import Served, serving

from megatron_resihp.control import keys
from megatron_resihp.control.commands.launch import seat
from megatron_resihp.control.commands.launch.launch_options import LaunchError, LaunchOptions
from megatron_resihp.control.commands.launch.launcher import NoEvents
from megatron_resihp.control.commands.launch.seat import check_still_there, take_seat
from megatron_resihp.control.head import returning
from megatron_resihp.control.head.returning import TAKEN_LOOK_S, Offers
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.access.secret import FILE_NAME, VARIABLE, fresh_secret
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.sockets import StoreError

ENDED = "that this node waited to join has ended"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(seat, "STILL_THERE_S", 0.5)
    with serving() as served:
        served.connect().set(keys.RUN, "this run")
        (tmp_path / FILE_NAME).write_text(served.secret.text)
        yield served


def test_a_job_that_answers_is_still_there(served: Served, tmp_path: Path) -> None:
    check_still_there(tmp_path, served.address, "this run")


def test_another_run_at_the_same_port_is_not(served: Served, tmp_path: Path) -> None:
    """The job may have been queued again, to the same node and with the same run directory."""
    with pytest.raises(StoreError, match=ENDED):
        check_still_there(tmp_path, served.address, "an earlier run")


@pytest.mark.parametrize("left", ["an earlier secret", "none"])
def test_nor_is_another_job(served: Served, tmp_path: Path, left: str) -> None:
    (tmp_path / FILE_NAME).unlink()
    if left != "none":
        (tmp_path / FILE_NAME).write_text(fresh_secret().text)
    with pytest.raises(StoreError, match=ENDED):
        check_still_there(tmp_path, served.address, "this run")


def test_nor_is_one_that_does_not_answer(served: Served, tmp_path: Path) -> None:
    served.close()
    with pytest.raises(StoreError, match="nothing answers at"):
        check_still_there(tmp_path, served.address, "this run")


@pytest.mark.parametrize("how", [SystemExit(143), LaunchError("a worker cannot be started"), None])
def test_a_launch_that_ends_leaves_the_place_that_it_has_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: BaseException | None
) -> None:
    """By a signal, an error, or since the coordinator was lost before the node was connected."""
    size = JobSize(1, 1, late_nodes=1)
    returning.begin(tmp_path, size)
    offers = Offers(tmp_path, set)
    offers.offer(1, [1])
    monkeypatch.setattr(seat, "_found", lambda address, run_dir, timeout_s: address)
    monkeypatch.setattr(seat, "admitted", lambda *_: (fresh_secret(), (False, False, False, "this run")))
    monkeypatch.setattr(seat, "find_secret", lambda run_dir: fresh_secret())
    options = LaunchOptions(
        ("train.py",), node=1, late_nodes=1, workers_per_node=1, run_dir=tmp_path, coordinator=Address("node0", 1)
    )
    with contextlib.suppress(SystemExit, LaunchError), ExitStack() as stack:
        assert take_seat(options, lambda run_dir: NoEvents(), stack).numbers == (1,)
        assert offers.look(TAKEN_LOOK_S) == []
        if how is not None:
            raise how
    assert offers.look(2 * TAKEN_LOOK_S) == [1]
