# SPDX-License-Identifier: Apache-2.0
"""The event log: what is written can be read, whatever happened to the file in between."""

from __future__ import annotations

import json
import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.events import job
from megatron_resihp.events.catalogue import EVENTS
from megatron_resihp.events.codec import UnusableEventError, plain, read_event
from megatron_resihp.events.event import Event, UnknownEvent, stamped
from megatron_resihp.events.injections import Drill
from megatron_resihp.events.job import RunStarted
from megatron_resihp.events.log import EventLog, Logged, read_events, read_last_run
from megatron_resihp.events.schema import markdown
from megatron_resihp.events.training import Agreed, EmergencyCheckpoint, Iteration, Samples
from megatron_resihp.events.workers import WorkerFailed

ROOT = Path(__file__).parents[3]
DRILL = Drill(action="kill", target=3)
FED: dict[str, Any] = {"event": "samples", "samples": [[2, 3]]}
LINE = '{"event": "drill", "time": 1.0, "action": "kill", "target": 3}'


def test_events_of_one_kind_are_those_of_the_last_run(tmp_path: Path) -> None:
    """Other lines are not even parsed."""
    with EventLog(tmp_path / "events.jsonl", clock=lambda: 12.5) as log:
        log.write(Drill(action="kill", target=1))
        log.write(RunStarted(world_size=4))
        log.write(Drill(action="kill", target=2))
        log.write(Drill(action="stop", target="node 1"))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "iteration", "damaged\n')
    found = read_last_run(tmp_path / "events.jsonl", Drill)
    assert [(each.action, each.target) for each in found] == [("kill", 2), ("stop", "node 1")]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", clock=lambda: 12.5) as log:
        log.write(Drill(epoch=0, action="kill", target=3))
        log.write(Drill(time=13.0, action="stop", target="node 1"))
    found = read_events(tmp_path / "events.jsonl")
    assert found.events == [
        Drill(time=12.5, epoch=0, action="kill", target=3), Drill(time=13.0, action="stop", target="node 1"),
    ]  # fmt: skip
    assert (found.malformed, found.truncated) == ([], False)


def test_an_event_that_comes_again_is_known_by_what_it_says(tmp_path: Path) -> None:
    """Also one whose loss is no number, and one from before the part of the log that was read."""
    told = [
        Iteration(time=time, epoch=0, worker=1, iteration=7, loss={}, grad_norm=math.nan) for time in (12.0, 13.0, 14.0)
    ]
    with EventLog(tmp_path / "events.jsonl") as log:
        for event in (told[0], told[2]):
            log.write(event)
    logged = Logged(lambda: read_events(log.path).events)
    assert [logged.has(event) for event in told] == [True, False, True]
    earlier, later = (Drill(time=time, action="kill", target=1) for time in (11.0, 15.0))
    assert logged.has(earlier) and not logged.has(later)
    assert not Logged(list).has(earlier)


def test_clocks_that_differ_neither_hide_events_nor_double_them(tmp_path: Path) -> None:
    """Worker 2's is half an hour behind. Of each worker's events the log's end has the last."""
    with EventLog(tmp_path / "events.jsonl") as log:
        for second in range(10):
            for worker, behind in ((1, 0.0), (2, 1800.0)):
                log.write(Drill(time=5000.0 + second - behind, worker=worker, action="kill", target=second))
    logged = Logged(lambda: read_events(log.path).events[10:])
    for worker, behind in ((1, 0.0), (2, 1800.0)):
        again = [Drill(time=5000.0 + n - behind, worker=worker, action="kill", target=n) for n in range(11)]
        assert [logged.has(event) for event in again] == [True] * 10 + [False]
    assert logged.has(Drill(time=3000.0, worker=3, action="kill", target=0)), "it is older than all that are there"


def test_who_takes_a_log_over_has_it_alone(tmp_path: Path) -> None:
    """The one before may be stopped, or cut off on another machine, and write when it continues."""
    path = tmp_path / "events.jsonl"
    before, after = (EventLog(path, clock=lambda: 12.5) for _ in range(2))
    before.write(Drill(action="kill", target=1))
    after.write(Drill(action="kill", target=2))
    path.write_text(path.read_text() + '{"event": "dri')  # the one before is in the middle of a line
    after.take_over()
    for _ in range(2):
        before.write(Drill(action="kill", target=3))
    after.write(Drill(action="kill", target=4))
    before.close()
    after.close()
    found = read_events(path)
    assert [each.target for each in found.events if isinstance(each, Drill)] == [1, 2, 4]
    assert found.malformed == [3] and list(tmp_path.iterdir()) == [path]


def test_a_log_that_can_not_be_copied_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        target.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with EventLog(tmp_path / "events.jsonl") as log:
        with pytest.raises(OSError, match="No space left"):
            log.take_over()
        log.write(DRILL)
    assert len(read_events(log.path).events) == 1 and list(tmp_path.iterdir()) == [log.path]


def test_an_event_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(DRILL)
    assert len(read_events(log.path).events) == 1
    log.close()


def test_numbers_that_json_lacks_are_spelled_out(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(Iteration(iteration=7, grad_norm=math.inf, loss={"lm loss": math.nan}))
    event = json.loads(log.path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (event["grad_norm"], event["loss"]["lm loss"]) == ("inf", "nan")
    (read,) = read_events(log.path).events
    assert isinstance(read, Iteration) and read.loss is not None
    assert read.grad_norm == math.inf and math.isnan(read.loss["lm loss"])


def test_a_scalar_of_another_library_is_written_as_a_number(tmp_path: Path) -> None:
    class Scalar:
        def item(self) -> float:
            return 0.5

    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(EmergencyCheckpoint(iteration=Scalar(), path=tmp_path, complete=True))  # type: ignore[arg-type]
    event = json.loads(log.path.read_text())
    assert (event["iteration"], event["path"]) == (0.5, str(tmp_path))


def test_every_class_of_events_is_in_the_catalogue() -> None:
    declared = {
        name
        for path in (ROOT / "megatron_resihp" / "events").glob("*.py")
        for name in re.findall(r'^@event\("(\w+)"', path.read_text(), re.MULTILINE)
    }
    assert len(declared) > 40 and declared == EVENTS.keys()


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:

        def write(thread: int) -> None:
            for number in range(200):
                log.write(WorkerFailed(worker=thread, failed=number, error="x" * 3000))

        threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read_events(log.path)
    assert len(found.events) == 800
    assert not found.malformed


def test_a_cut_off_last_line_is_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f'{LINE}\n{{"event": "itera')
    found = read_events(path)
    assert (len(found.events), found.malformed, found.truncated) == (1, [], True)


def test_a_last_line_without_a_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(LINE)
    found = read_events(path)
    assert (len(found.events), found.truncated) == (1, False)


def test_lines_that_hold_no_event_are_counted_by_number(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(LINE.encode() + b'\nnonsense\n\n[1]\n{"no": "name"}\n\xff\xfe\n' + LINE.encode() + b"\n")
    found = read_events(path)
    assert (len(found.events), found.malformed, found.truncated) == (2, [2, 4, 5, 6], False)


def test_a_new_writer_does_not_glue_its_event_to_a_cut_off_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "itera')
    with EventLog(path) as log:
        log.write(DRILL)
    found = read_events(path)
    assert ([type(event) for event in found.events], found.malformed) == ([Drill], [1])


def test_only_lines_of_the_last_run_damage_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "run_started"}\n{"event": "itera\n{"event": "run_started"}\n{"event": "dri')
    assert not read_events(path).damaged, "the run before was cut off, and this one is being written"
    with path.open("a") as log:
        log.write("ll\n")
    assert read_events(path).damaged


def test_a_closed_log_refuses_events(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.write(DRILL)


def test_the_documentation_is_that_of_the_schema() -> None:
    written = (ROOT / "docs" / "events.md").read_text()
    assert written == markdown(), "run `python -m megatron_resihp.events.schema > docs/events.md`"


def test_a_synthetic_run_follows_the_schema(recovered_run: Any) -> None:
    assert not [event for event in recovered_run.events if isinstance(event, UnknownEvent)]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"iteration": None}, "iteration lacks iteration"),
        ({"iteration": "7"}, "iteration has the wrong type of iteration: expected integer"),
        ({"iteration": True}, "iteration has the wrong type of iteration: expected integer"),
        ({"loss": {"lm loss": "high"}}, "iteration has the wrong type of loss: expected object of numbers"),
        ({"skipped": 1}, "iteration has the wrong type of skipped: expected true or false"),
        ({"time": None}, "iteration lacks time"),
        ({"event": "straggler", "time": None}, "straggler lacks time"),
        (
            {"event": "samples", "samples": [[3, 2]], "epoch": 0},
            "samples has the wrong type of samples: expected list of [first, last]",
        ),
        (FED, "samples lacks epoch"),
        ({"event": "epoch_started", "plan": {}}, "epoch_started has the wrong type of plan: expected plan"),
    ],
)
def test_what_keeps_a_reader_from_an_event_is_named(change: dict[str, Any], problem: str) -> None:
    good = {"event": "iteration", "time": 1.0, "iteration": 7, "loss": {"lm loss": "nan"}}
    assert isinstance(read_event(good), Iteration)
    with pytest.raises(UnusableEventError) as error:
        read_event({**good, **change})
    assert str(error.value) == problem


def test_an_event_that_can_not_be_used_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "drill"}\n' * 2 + LINE)
    found = read_events(path)
    assert (len(found.events), found.malformed, found.damaged) == (1, [], False)
    assert found.ignored == {"drill lacks time": 2}


def test_fields_of_a_later_version_are_left_out() -> None:
    line = {"event": "agreed", "time": 1.0, "epoch": 2, "iteration": 3, "mood": "good"}
    assert read_event(line) == Agreed(time=1.0, epoch=2, iteration=3)


def test_an_event_of_a_later_version_is_passed_on_as_it_came() -> None:
    line = {"event": "straggler", "time": 1.0, "worker": 3, "mood": "bad"}
    event = read_event(line)
    assert isinstance(event, UnknownEvent) and (event.time, event.worker) == (1.0, 3)
    assert plain(event) == line


def test_who_writes_an_event_down_fills_in_what_it_does_not_say() -> None:
    assert stamped(DRILL, 2.0, 3, 4) == Drill(time=2.0, epoch=3, worker=4, action="kill", target=3)
    said = Drill(time=1.0, epoch=0, worker=0, action="kill", target=3)
    assert stamped(said, 2.0, 3, 4) == said
    for event in (DRILL, said):
        assert plain(event, 2.0, 3, 4) == plain(stamped(event, 2.0, 3, 4))


def test_a_wrong_field_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="mood"):
        job.RunFinished(exit_code=0, mood="good")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="exit_code"):
        job.RunFinished()  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", EVENTS.values(), ids=EVENTS)
def test_the_names_on_disk_are_those_of_the_class(kind: type[Event]) -> None:
    """And all fields have a kind and a meaning."""
    assert f"## {kind.name}\n" in markdown()


def test_lists_are_read_as_tuples() -> None:
    event = read_event({"event": "samples", "time": 1.0, "epoch": 0, "iteration": 1, "samples": [[0, 7], [9, 9]]})
    assert event == Samples(time=1.0, epoch=0, iteration=1, samples=((0, 7), (9, 9)))
    assert read_event(json.loads(json.dumps(plain(event)))) == event
