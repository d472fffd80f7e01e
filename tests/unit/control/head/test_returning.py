# SPDX-License-Identifier: Apache-2.0
"""What a node finds in the run directory before it is connected to anything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from megatron_resihp.control.head import returning
from megatron_resihp.control.head.returning import CONNECTS_WITHIN_S, TAKEN_LOOK_S, Offers
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


class TestTakenInVain:
    """By a launcher that ended before its node was connected. Nobody else tells the coordinator of that."""

    @pytest.fixture
    def connected(self) -> set[int]:
        return set()

    @pytest.fixture
    def offers(self, tmp_path: Path, connected: set[int]) -> Offers:
        returning.begin(tmp_path, JobSize(2, 2))
        offers = Offers(tmp_path, lambda: connected)
        offers.offer(1, (6, 7))
        return offers

    @pytest.fixture
    def looks(self) -> Iterator[float]:
        """When the coordinator looks."""
        return (TAKEN_LOOK_S * number for number in count(1))

    def test_a_launcher_that_ends_gives_its_place_back(
        self, tmp_path: Path, offers: Offers, looks: Iterator[float]
    ) -> None:
        assert offers.look(next(looks)) == []
        assert returning.take(tmp_path, 1) == (6, 7)
        assert offers.look(next(looks)) == []
        returning.give_back(tmp_path, 1)
        assert offers.look(next(looks)) == [1]
        assert offers.look(next(looks)) == [], "told once"

    def test_a_launcher_that_was_killed_leaves_its_place_after_a_while(
        self, tmp_path: Path, offers: Offers, looks: Iterator[float]
    ) -> None:
        returning.take(tmp_path, 1)
        in_time = int(CONNECTS_WITHIN_S / TAKEN_LOOK_S)
        assert [offers.look(next(looks)) for _ in range(in_time)] == [[]] * in_time
        assert offers.look(next(looks)) == [1]

    def test_time_in_which_the_coordinator_was_stopped_does_not_count(self, tmp_path: Path, offers: Offers) -> None:
        """Nobody could connect to it."""
        returning.take(tmp_path, 1)
        assert offers.look(1.0) == [] and offers.look(1.0 + 2 * CONNECTS_WITHIN_S) == []

    def test_a_node_that_is_connected_has_not_taken_it_in_vain(
        self, tmp_path: Path, offers: Offers, connected: set[int], looks: Iterator[float]
    ) -> None:
        returning.take(tmp_path, 1)
        connected.add(1)
        offers.look(next(looks))
        connected.clear()
        returning.give_back(tmp_path, 1)
        assert offers.look(next(looks)) == [], "its loss is told otherwise"

    def test_a_node_that_was_late_needs_no_other_place(
        self, tmp_path: Path, offers: Offers, connected: set[int], looks: Iterator[float]
    ) -> None:
        returning.take(tmp_path, 1)
        offers.offer(1, (10, 11))
        connected.add(1)
        offers.look(next(looks))
        assert returning.take(tmp_path, 1) is None

    def test_who_has_taken_an_earlier_offer_does_not_give_the_next_one_back(
        self, tmp_path: Path, offers: Offers, looks: Iterator[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        returning.take(tmp_path, 1)
        offers.offer(1, (10, 11))
        with monkeypatch.context() as other_process:
            other_process.setattr(returning, "_OURS", "another")
            assert returning.take(tmp_path, 1) == (10, 11)
        returning.give_back(tmp_path, 1)
        assert offers.look(next(looks)) == []

    def test_a_run_directory_that_can_not_be_written_is_not_tried_again_and_again(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        offers = Offers(tmp_path / "away", set)
        offers.offer(1, (6, 7))
        assert "node 1 can't come, the run directory can't be written" in capsys.readouterr().out
        assert offers.look(TAKEN_LOOK_S) == []
