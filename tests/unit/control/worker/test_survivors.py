# SPDX-License-Identifier: Apache-2.0
"""What workers that have lost the coordinator make of each other's records."""

from __future__ import annotations

import errno
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.coding import decode, encode
from megatron_resihp.control import shared_files
from megatron_resihp.control.coordination.record import NoCommitError
from megatron_resihp.control.worker import noticeboard
from megatron_resihp.control.worker.noticeboard import Noticeboard
from megatron_resihp.control.worker.survivors import Decision, Standing, awaited, decide, missing, part_of
from megatron_resihp.plan import Coordinate, Shard
from megatron_resihp.protocol.records import IterationPhase, Outcome, Record

FIRST, SECOND = (Shard(0, 2, 0, 1),), (Shard(2, 4, 0, 1),)
OUTCOME = Outcome(0, 1.5)


def told(iteration: int, stage: IterationPhase, held: tuple[Shard, ...], **more: Any) -> Standing:
    """By a worker that keeps counters of this iteration and the one before, and what was agreed on."""
    agreed = {iteration - 1: OUTCOME, **({iteration: OUTCOME} if stage >= IterationPhase.AGREED else {})}
    counters: dict[int, dict[str, Any]] = {iteration - 1: {"at": iteration - 1}, iteration: {"at": iteration}}
    return Standing(Record(iteration, stage, outcomes=agreed, counters=counters), held, **more)


def test_survivors_in_the_same_iteration_save_the_one_before() -> None:
    everybody = {2: told(7, IterationPhase.COMPUTE, FIRST), 3: told(7, IterationPhase.REDUCED, SECOND)}
    decision = decide(everybody, "emergency_checkpoint")
    assert decision.commit.iteration == 6 and not decision.commit.replay
    assert decision.writers == {2: FIRST, 3: SECOND}
    assert [part_of(worker, one, decision) for worker, one in everybody.items()] == [FIRST, SECOND]


def test_who_has_heard_of_the_agreement_takes_the_others_with_it() -> None:
    """Who has reduced the gradients takes the step now; who is an iteration on drops its work."""
    everybody = {
        2: told(7, IterationPhase.REDUCED, FIRST),
        3: told(7, IterationPhase.AGREED, SECOND),
        4: told(8, IterationPhase.COMPUTE, FIRST),
    }
    decision = decide(everybody, "emergency_checkpoint")
    assert decision.commit.iteration == 7 and decision.commit.outcome == OUTCOME
    assert decision.writers == {2: FIRST, 3: SECOND}
    assert part_of(4, everybody[4], decision) == (), "another one writes the same"


def test_iterations_are_never_mixed() -> None:
    """A worker that nobody heard in time is an iteration on, and can't go back."""
    decision = decide({2: told(7, IterationPhase.REDUCED, FIRST)}, "emergency_checkpoint")
    assert decision.commit.iteration == 6
    assert part_of(3, told(7, IterationPhase.STEPPED, SECOND), decision) is None
    assert part_of(3, told(9, IterationPhase.COMPUTE, SECOND), decision) is None
    assert part_of(3, told(7, IterationPhase.COMPUTE, SECOND), decision) == SECOND, "it came late, and fits"


def test_a_record_that_contradicts_the_others_writes_nothing_of_theirs() -> None:
    everybody = {2: told(7, IterationPhase.COMPUTE, FIRST), 3: told(7, IterationPhase.STEPPED, FIRST)}
    decision = decide(everybody, "emergency_checkpoint")
    assert decision.writers == {3: FIRST} and part_of(2, everybody[2], decision) is None


def test_each_writes_its_own_parts_of_a_distributed_optimizer() -> None:
    decision = decide(
        {w: told(7, IterationPhase.COMPUTE, FIRST, in_parts=True) for w in (2, 3)}, "emergency_checkpoint"
    )
    assert decision.writers == {2: FIRST, 3: FIRST}


@pytest.mark.parametrize(("second", "entire"), [(SECOND, True), ((Shard(0, 4, 0, 1),), False)])
def test_it_is_known_whether_some_hold_more_than_they_write(second: tuple[Shard, ...], entire: bool) -> None:
    """The second worker writes what the first one doesn't hold."""
    everybody = {2: told(7, IterationPhase.COMPUTE, FIRST), 3: told(7, IterationPhase.COMPUTE, second)}
    decision = decide(everybody, "emergency_checkpoint")
    assert decision.writers == {2: FIRST, 3: SECOND} and decision.entire == entire


def test_standbys_alone_do_not_know_where_the_run_was() -> None:
    standby = Standing(Record(7, IterationPhase.STEPPED, works=False, outcomes={7: OUTCOME}), FIRST)
    with pytest.raises(NoCommitError):
        decide({2: standby}, "emergency_checkpoint")
    joining = Standing(Record(7, IterationPhase.STEPPED, counters={7: {}}), FIRST)
    with pytest.raises(NoCommitError, match="agreed on for iteration 7"):
        decide({2: joining}, "emergency_checkpoint")


def test_nobody_waits_for_workers_that_died_with_node_0() -> None:
    node_0 = frozenset({0, 1})
    assert awaited(range(6), node_0, me=4) == {2, 3, 4, 5}
    assert awaited(range(6), node_0, me=1) == set(range(6)), "its own agent lives"


def test_what_is_missing_is_named() -> None:
    saved = [Coordinate(0, 0), Coordinate(1, 1)]
    assert missing(saved, stages=2, tensor_parallel=2) == [Coordinate(0, 1), Coordinate(1, 0)]


class LateFiles:
    """A file system of several nodes as one of them sees it: each file late, and some replaced while they are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
        self._looks: Counter[str] = Counter()
        self._late = looks
        self._read, self._names = shared_files.read, shared_files.names
        monkeypatch.setattr(shared_files, "read", self.read)
        monkeypatch.setattr(shared_files, "names", self.names)

    def read(self, path: Path) -> str:
        if self._is_early(f"read {path.name}"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return self._read(path)

    def names(self, directory: Path, pattern: str) -> list[Path]:
        return [path for path in self._names(directory, pattern) if not self._is_early(f"see {path.name}")]

    def _is_early(self, what: str) -> bool:
        self._looks[what] += 1
        return self._looks[what] <= self._late


def test_survivors_agree_on_a_file_system_that_shows_late_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noticeboard, "LOOK_S", 0.0)
    boards = [Noticeboard(tmp_path / "board", worker) for worker in (2, 3)]
    for board, note in zip(boards, ({"at": 6}, {"at": 7}), strict=True):
        board.pin("record", note)
    LateFiles(monkeypatch, looks=3)
    for board in boards:
        assert board.gather("record", {2, 3}, timeout_s=60.0) == {2: {"at": 6}, 3: {"at": 7}}
    assert boards[0].decide({"by": 2}) == boards[1].decide({"by": 3}) == {"by": 2}


def test_a_note_of_ones_own_counts_though_it_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Noticeboard(tmp_path / "board", 2)
    board.pin("record", {"at": 6})
    monkeypatch.setattr(shared_files, "names", lambda directory, pattern: [])
    assert board.gather("record", {2, 3}, timeout_s=0.0) == {2: {"at": 6}}


def test_a_decision_that_is_never_seen_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noticeboard, "SEEN_WITHIN_S", 0.0)
    monkeypatch.setattr(noticeboard, "LOOK_S", 0.0)
    board = Noticeboard(tmp_path / "board", 2)
    LateFiles(monkeypatch, looks=10**9)
    with pytest.raises(TimeoutError, match="is not seen from here"):
        board.decide({"by": 2})


def test_the_first_decision_binds_all(tmp_path: Path) -> None:
    boards = [Noticeboard(tmp_path / "board", worker) for worker in (2, 3)]
    standings = {2: told(7, IterationPhase.COMPUTE, FIRST), 3: told(7, IterationPhase.AGREED, SECOND)}
    boards[0].pin("record", encode(standings[2]))
    alone = boards[0].gather("record", {2, 3}, timeout_s=0.0)
    assert alone.keys() == {2}
    boards[1].pin("record", encode(standings[3]))
    both = boards[1].gather("record", {2, 3}, timeout_s=60.0)
    assert {worker: decode(Standing, note) for worker, note in both.items()} == standings
    first, second = (
        decode(Decision, board.decide(encode(decide(dict(list(standings.items())[:number]), "emergency_checkpoint"))))
        for board, number in zip(boards, (1, 2), strict=True)
    )
    assert first == second and first.commit.iteration == 6
    assert [path.name for path in (tmp_path / "board").glob(".*")] == [], "nothing is left half written"
    assert json.loads((tmp_path / "board" / "decision.json").read_text())["told"] == [2]
