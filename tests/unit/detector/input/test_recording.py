# SPDX-License-Identifier: Apache-2.0
"""A run's records on disk: the last run is read back, also after a writer was killed."""

from pathlib import Path

import numpy as np
import pytest

from megatron_resihp.detector.input.layout import layout_of
from megatron_resihp.detector.input.recording import Recorder, Recording, RecordingError
from megatron_resihp.plan import Chunk, Migration, ParallelPlan, PlannedOp, Replica, Schedule
from megatron_resihp.plan.schedule import EXPLICIT

PLAN = ParallelPlan((Replica(((0, 1), (2, 3)), (0, 1)), Replica(((4, 5), (6, 7)), (2, 3))))
LAYOUT = layout_of(PLAN, 2, {worker: worker // 4 for worker in range(8)})


def test_a_layout_says_where_workers_stand_and_who_sends_to_whom() -> None:
    assert LAYOUT.workers.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert LAYOUT.replica.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert LAYOUT.stage.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert LAYOUT.tp_rank.tolist() == [0, 1] * 4
    assert LAYOUT.node.tolist() == [0] * 4 + [1] * 4
    assert LAYOUT.links.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_interleaved_pipelines_close_their_ring() -> None:
    plan = ParallelPlan((Replica(((0,), (1,), (2,)), (0,)),))
    assert layout_of(plan, 0, {0: 0, 1: 0, 2: 0}, interleaved=True).links.tolist() == [[0, 1], [1, 2], [2, 0]]
    pair = ParallelPlan((Replica(((0,), (1,)), (0,)),))
    assert layout_of(pair, 0, {0: 0, 1: 0}, interleaved=True).links.tolist() == [[0, 1]]


def test_workers_of_unlike_stages_are_not_compared() -> None:
    halves, thirds = (Chunk(0, 0, 3), Chunk(1, 3, 6)), (Chunk(0, 0, 2), Chunk(1, 2, 6))
    plan = ParallelPlan((
        Replica(((0, 1), (2,)), (0, 1), halves),
        Replica(((3, 4), (5, 6)), (2, 3), halves),
        Replica(((7,), (8,)), (4,), thirds),
    ))  # fmt: skip
    layout = layout_of(plan, 1, dict.fromkeys(range(9), 0))
    assert not layout.native
    stages = dict(zip(layout.workers.tolist(), layout.stage.tolist(), strict=True))
    alike = {frozenset(worker for worker, stage in stages.items() if stage == each) for each in stages.values()}
    assert alike == {frozenset(each) for each in ((0, 1, 3, 4), (2,), (5, 6), (7,), (8,))}
    assert {*map(tuple, layout.links.tolist())} == {(0, 2), (1, 2), (3, 5), (4, 6), (7, 8)}


def test_migrated_work_has_links_between_replicas() -> None:
    chunks = (Chunk(0, 0, 2), Chunk(1, 2, 4))

    def order(stage: int, *micro_batches: int) -> tuple[PlannedOp, ...]:
        return tuple(PlannedOp(kind, stage, micro_batch) for micro_batch in micro_batches for kind in "FB")

    schedules = (
        Schedule(EXPLICIT, orders=(order(0, 0), ())),
        Schedule(EXPLICIT, orders=(order(0, 1), order(1, 0, 1))),
    )
    plan = ParallelPlan(
        (Replica(((0,), ()), (0,), chunks, schedules[0]), Replica(((1,), (2,)), (1,), chunks, schedules[1])),
        migrations=(Migration(0, 1, 1),),
    )
    layout = layout_of(plan, 1, dict.fromkeys(range(3), 0))
    assert {*map(tuple, layout.links.tolist())} == {(0, 2), (1, 2)}
    assert layout.stage[0] == layout.stage[1] != layout.stage[2]


def write(path: Path, *messages: bytes, job: str = "first") -> None:
    recorder = Recorder(path, {"job": job})
    recorder.layout(LAYOUT)
    for message in messages:
        recorder.message(message)
    recorder.close()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "r", b"one", b"", b"three")
    recording = Recording(tmp_path / "r")
    layout, *messages = recording
    assert recording.job == {"job": "first"} and not recording.cut
    assert not isinstance(layout, bytes)
    assert layout.epoch == 2
    assert np.array_equal(layout.links, LAYOUT.links) and np.array_equal(layout.node, LAYOUT.node)
    assert messages == [b"one", b"", b"three"]


def test_of_several_runs_the_last_is_read(tmp_path: Path) -> None:
    write(tmp_path / "r", b"old")
    write(tmp_path / "r", b"new", job="second")
    recording = Recording(tmp_path / "r")
    assert recording.job == {"job": "second"}
    assert list(recording)[1:] == [b"new"]


def test_a_cut_tail_is_told_and_costs_one_record(tmp_path: Path) -> None:
    write(tmp_path / "r", b"whole", b"cut off in the middle")
    data = (tmp_path / "r").read_bytes()
    for lost in (1, 15, 21, 25):
        (tmp_path / "r").write_bytes(data[:-lost])
        recording = Recording(tmp_path / "r")
        assert recording.cut
        assert list(recording)[1:] == [b"whole"]


def test_a_run_after_a_killed_one_is_whole(tmp_path: Path) -> None:
    write(tmp_path / "r", b"cut off in the middle")
    (tmp_path / "r").write_bytes((tmp_path / "r").read_bytes()[:-4])
    write(tmp_path / "r", b"new", job="second")
    recording = Recording(tmp_path / "r")
    assert not recording.cut
    assert list(recording)[1:] == [b"new"]


@pytest.mark.parametrize("cut", [0, 1])
def test_what_the_coordinator_before_still_records_is_not_in_the_file(tmp_path: Path, cut: int) -> None:
    """It may be stopped, or cut off on another machine, and in the middle of a record."""
    path = tmp_path / "r"
    before = Recorder(path, {"job": "first"})
    before.message(b"one")
    before.message(b"two")
    before.flush()
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])
    after = Recorder(path, {"job": "second"}, taken_over=True)
    after.layout(LAYOUT)
    after.flush()
    before.message(b"late")
    before.close()
    after.message(b"three")
    after.flush()
    recording = Recording(path)
    assert recording.job == {"job": "second"} and not recording.cut
    assert list(recording)[1:] == [b"three"]
    assert b"one" in path.read_bytes(), "what was there is kept"
    after.close()
    assert list(tmp_path.iterdir()) == [path]


def test_one_that_takes_over_where_there_is_no_file_makes_it(tmp_path: Path) -> None:
    Recorder(tmp_path / "r", {"job": "second"}, taken_over=True).close()
    assert Recording(tmp_path / "r").job == {"job": "second"}


@pytest.mark.parametrize(("content", "says"), [(b"", "not a recording"), (b"no recording at all", "not a recording")])
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(RecordingError, match=says):
        Recording(tmp_path / "r")


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(b"somebody's thesis")
    with pytest.raises(RecordingError):
        Recorder(tmp_path / "r", {})
    assert (tmp_path / "r").read_bytes() == b"somebody's thesis"


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot be read"):
        Recording(tmp_path / "none")


def test_a_damaged_layout_is_one_line(tmp_path: Path) -> None:
    write(tmp_path / "r")
    damaged = (tmp_path / "r").read_bytes().replace(b'"links"', b'"lonks"')
    (tmp_path / "r").write_bytes(damaged)
    with pytest.raises(RecordingError, match="damaged layout"):
        list(Recording(tmp_path / "r"))
