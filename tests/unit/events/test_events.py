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

from megatron_resihp.events import log as names
from megatron_resihp.events.log import EventLog, read_events
from megatron_resihp.events.schema import EVENTS, markdown, problems

ROOT = Path(__file__).parents[3]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", clock=lambda: 12.5) as log:
        log.write({"event": "drill", "epoch": 0, "worker": None, "action": "kill", "target": 3})
        log.write({"event": "drill", "time": 13.0, "action": "stop", "target": "node 1"})
    found = read_events(tmp_path / "events.jsonl")
    assert [event["time"] for event in found.events] == [12.5, 13.0]
    assert found.events[0]["target"] == 3
    assert (found.malformed, found.truncated) == ([], False)


def test_an_event_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write({"event": "drill"})
    assert len(read_events(log.path).events) == 1
    log.close()


def test_numbers_that_json_lacks_are_spelled_out(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write({"event": "iteration", "grad_norm": math.inf, "loss": {"lm loss": math.nan}})
    event = json.loads(log.path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (event["grad_norm"], event["loss"]["lm loss"]) == ("inf", "nan")


def test_a_scalar_of_another_library_is_written_as_a_number(tmp_path: Path) -> None:
    class Scalar:
        def item(self) -> float:
            return 0.5

    with EventLog(tmp_path / "events.jsonl") as log:
        log.write({"event": "iteration", "grad_norm": Scalar(), "path": tmp_path})
    event = read_events(log.path).events[0]
    assert (event["grad_norm"], event["path"]) == (0.5, str(tmp_path))


def test_whatever_is_written_is_in_the_table() -> None:
    name = re.compile(r'(?:"event": |\.event\(\s*)"([a-z_]+)"')
    written = {each for path in (ROOT / "megatron_resihp").rglob("*.py") for each in name.findall(path.read_text())}
    assert len(written) > 30 and not written - EVENTS.keys()


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:

        def write(thread: int) -> None:
            for number in range(200):
                log.write({"event": "phase", "worker": thread, "number": number, "padding": "x" * 3000})

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
    path.write_text('{"event": "drill"}\n{"event": "itera')
    found = read_events(path)
    assert (len(found.events), found.malformed, found.truncated) == (1, [], True)


def test_a_last_line_without_a_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "drill"}')
    found = read_events(path)
    assert (len(found.events), found.truncated) == (1, False)


def test_lines_that_hold_no_event_are_counted_by_number(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "drill"}\nnonsense\n\n[1]\n{"no": "name"}\n\xff\xfe\n{"event": "drill"}\n')
    found = read_events(path)
    assert (len(found.events), found.malformed, found.truncated) == (2, [2, 4, 5, 6], False)


def test_a_new_writer_does_not_glue_its_event_to_a_cut_off_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "itera')
    with EventLog(path) as log:
        log.write({"event": "drill"})
    found = read_events(path)
    assert ([event["event"] for event in found.events], found.malformed) == (["drill"], [1])


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
        log.write({"event": "drill"})


def test_the_documentation_is_that_of_the_schema() -> None:
    written = (ROOT / "docs" / "events.md").read_text()
    assert written == markdown(), "run `python -m megatron_resihp.events.schema > docs/events.md`"


def test_every_named_event_has_a_schema() -> None:
    constants = {
        value
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and name not in ("FILE_NAME",)
    }
    assert constants == set(EVENTS)


def test_a_synthetic_run_follows_the_schema(recovered_run: Any) -> None:
    assert [problem for event in recovered_run.events for problem in problems(event)] == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"iteration": None}, "iteration lacks iteration"),
        ({"iteration": "7"}, "iteration has a iteration that is no integer"),
        ({"loss": {"lm loss": "high"}}, "iteration has a loss that is no object of numbers"),
        ({"skipped": 1}, "iteration has a skipped that is no true or false"),
        ({"time": None}, "iteration lacks time"),
    ],
)
def test_the_schema_names_what_is_wrong(change: dict[str, Any], problem: str) -> None:
    good = {"event": "iteration", "time": 1.0, "iteration": 7, "loss": {"lm loss": "nan"}}
    assert problems(good) == []
    assert problems({**good, **change}) == [problem]


def test_an_event_of_a_later_version_is_no_problem() -> None:
    assert problems({"event": "straggler", "time": 1.0}) == []
