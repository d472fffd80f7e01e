# SPDX-License-Identifier: Apache-2.0
"""How a node that waits to join a job finds that there is none to join any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served, serving

from megatron_resihp.control import keys
from megatron_resihp.control.commands import seat
from megatron_resihp.control.commands.seat import check_still_there
from megatron_resihp.control.transport.secret import FILE_NAME, VARIABLE, fresh_secret
from megatron_resihp.control.transport.store import StoreError

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
