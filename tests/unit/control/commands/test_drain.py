# SPDX-License-Identifier: Apache-2.0
"""`resihp drain` and `resihp stop`: what they send, and what they say. What follows is in test_departures.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.cli import main
from megatron_resihp.control.commands import contact
from megatron_resihp.protocol.answers import Accepted, Answer, Refused
from megatron_resihp.protocol.messages import DrainRequest, EndRequest


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What commands have sent; worker 9 is in no job."""
    messages: list[Any] = []

    def ask(store: object, request: Any, sender: str) -> Answer:
        messages.append((sender, request))
        refused = isinstance(request, DrainRequest) and 9 in request.workers
        return Refused("worker 9 is not in the job") if refused else Accepted("so be it")

    monkeypatch.setattr(contact, "reach", lambda run_dir: None)
    monkeypatch.setattr(contact, "ask", ask)
    return messages


@pytest.mark.parametrize(
    ("arguments", "request_"),
    [
        (["node:2", "node:1", "node:2"], DrainRequest((1, 2), ())),
        (["worker:5", "node:1", "--deadline", "60"], DrainRequest((1,), (5,), 60.0)),
    ],
)
def test_what_is_to_leave(
    sent: list[Any], capsys: pytest.CaptureFixture[str], arguments: list[str], request_: DrainRequest
) -> None:
    assert main(["drain", "run", *arguments]) == 0
    assert sent == [("resihp drain", request_)] and capsys.readouterr().out == "resihp: so be it\n"


def test_a_refusal_is_one_line(sent: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "run", "worker:9"]) == 2
    assert capsys.readouterr().err == "resihp: worker 9 is not in the job\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1"], "'1' names nothing; give node:RANK or worker:ID"),
        (["node:-1"], "'node:-1' names nothing"),
        (["node:1", "--deadline", "0"], "0 is not a time; give seconds, more than 0"),
        (["node:1", "--deadline", "soon"], "soon is not a time"),
        ([], "the following arguments are required: node:RANK|worker:ID"),
    ],
)
def test_what_can_not_be_read(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["drain", "run", *arguments])
    assert refused.value.code == 2 and said in capsys.readouterr().err


def test_a_job_is_stopped(sent: list[Any]) -> None:
    assert (main(["stop", "run"]), main(["stop", "run", "--save"])) == (0, 0)
    assert sent == [("resihp stop", EndRequest(False)), ("resihp stop", EndRequest(True))]


def test_where_no_job_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["drain", str(tmp_path), "node:1"], ["stop", str(tmp_path)]):
        assert main(command) == 2
        assert capsys.readouterr().err == f"resihp: no job runs in {tmp_path}\n"


def test_a_run_directory_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    for command in (["drain", str(gone), "node:1"], ["stop", str(gone)]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said == f"resihp: {gone} does not exist; give the run directory of a job that runs\n"
