# SPDX-License-Identifier: Apache-2.0
"""What a node finds in the run directory before it is connected to anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_resihp.control.head import returning
from megatron_resihp.control.job_size import JobSize

PATIENCE_S = 60.0


class GoneError(Exception):
    """Node 0 is."""


def gone() -> None:
    raise GoneError


def test_a_late_node_waits_for_its_offer_as_long_as_node_0_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    returning.begin(tmp_path, JobSize(1, 2, late_nodes=1))
    with pytest.raises(GoneError):
        returning.await_offer(tmp_path, 1, gone, PATIENCE_S)
    assert capsys.readouterr().out == "resihp: node 1 waits until the job trains, to join it then\n"
    returning.offer(tmp_path, 1, (2, 3))
    assert returning.await_offer(tmp_path, 1, gone, PATIENCE_S) == (2, 3)
    assert capsys.readouterr().out == ""


def test_a_node_of_a_rank_that_has_joined_is_refused_until_that_one_is_lost(tmp_path: Path) -> None:
    returning.begin(tmp_path, JobSize(1, 2, late_nodes=2))
    returning.offer(tmp_path, 1, (2, 3))
    returning.take(tmp_path, 1)
    with pytest.raises(returning.RefusedError, match="node 1 has joined already"):
        returning.await_offer(tmp_path, 1, lambda: None, patience_s=0.0)
    with pytest.raises(GoneError):
        returning.await_offer(tmp_path, 2, gone, PATIENCE_S)
    returning.offer(tmp_path, 1, (8, 9))
    assert returning.await_offer(tmp_path, 1, gone, PATIENCE_S) == (8, 9)


@pytest.mark.parametrize("joined", [True, False], ids=["of those that began the job", "came later"])
def test_a_replacement_waits_until_the_one_before_it_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], joined: bool
) -> None:
    returning.begin(tmp_path, JobSize(1, 2, late_nodes=1))
    if not joined:
        returning.offer(tmp_path, 1, (2, 3))
        returning.take(tmp_path, 1)
    found = returning.await_offer(tmp_path, 1, lambda: returning.offer(tmp_path, 1, (8, 9)), PATIENCE_S, joined)
    assert found == (8, 9)
    assert capsys.readouterr().out == "resihp: node 1 waits until the loss of the one before it is noticed\n"


def test_a_late_node_with_a_run_directory_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(returning, "SEEN_WITHIN_S", 0.0)
    monkeypatch.setattr(returning, "LOOK_S", 0.01)
    with pytest.raises(returning.RefusedError, match="isn't the coordinator's run directory; give one that all"):
        returning.await_offer(tmp_path, 1, lambda: None, PATIENCE_S)


def test_offers_of_an_earlier_job_are_forgotten(tmp_path: Path) -> None:
    returning.begin(tmp_path, JobSize(1, 2, late_nodes=1))
    returning.offer(tmp_path, 1, (2, 3))
    returning.begin(tmp_path, JobSize(1, 2, late_nodes=1))
    assert returning.take(tmp_path, 1) is None
