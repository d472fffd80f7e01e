# SPDX-License-Identifier: Apache-2.0
"""How a worker whose script raises an error ends."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.control.node import bootstrap, environment
from megatron_resihp.protocol.messages import ScriptFailed

ECC, ILLEGAL_ADDRESS = 214, 700


class Ended(BaseException):
    """In place of the end of the process."""


def on_device(code: int | None) -> Exception:
    error = torch.AcceleratorError("CUDA error")
    if code is not None:
        error.error_code = code  # as torch does
    return error


def of_loader(text: str) -> Exception:
    """As torch raises it where a batch is waited for: what its signal handler has raised is the cause."""
    error = RuntimeError("DataLoader worker (pid(s) 123) exited unexpectedly")
    error.__cause__ = RuntimeError(text)
    return error


DIES, FAILS = [("kill", signal.SIGKILL)], [("told", ScriptFailed), ("exit", 1)]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (on_device(ECC), DIES),
        (on_device(ILLEGAL_ADDRESS), FAILS),
        (on_device(None), FAILS),
        (RuntimeError("DataLoader worker (pid 123) is killed by signal: Killed. "), DIES),
        (of_loader("DataLoader worker (pid 123) is killed by signal: Bus error. It is possible that"), DIES),
        (of_loader("Empty"), FAILS),
    ],
    ids=["device", "script on the device", "script", "data loader", "data loader, waited for", "data loader's own"],
)
def test_who_dies_and_who_fails(monkeypatch: pytest.MonkeyPatch, error: Exception, end: list[Any]) -> None:
    """The death of a worker is recovered from; an error of the script ends the job."""
    seen: list[Any] = []

    def run(command: Sequence[str]) -> None:
        raise error

    def kill(pid: int, number: int) -> None:
        seen.append(("kill", number))
        raise Ended

    def leave(number: int) -> None:
        seen.append(("exit", number))
        raise Ended

    monkeypatch.setattr(bootstrap, "let_no_full_disk_end_this", lambda: None)
    monkeypatch.setattr(bootstrap, "_tie_to_agent", lambda: SimpleNamespace(last_word=lambda word: None))
    monkeypatch.setattr(bootstrap, "_run", run)
    monkeypatch.setattr(bootstrap, "_tell", lambda message: seen.append(("told", type(message))))
    monkeypatch.setenv(environment.WORKER, "1")
    monkeypatch.setattr(bootstrap.os, "kill", kill)
    monkeypatch.setattr(bootstrap.os, "_exit", leave)
    with pytest.raises(Ended):
        bootstrap.main(["script.py"])
    assert seen == end


def test_a_module_runs_as_python_would_run_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trainer_of_a_test").mkdir()
    (tmp_path / "trainer_of_a_test" / "main.py").write_text("import sys; print(__name__, __package__, sys.argv)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr("megatron_resihp.enable", lambda: None)
    bootstrap._run(["-m", "trainer_of_a_test.main", "--lr", "1"])
    path = tmp_path / "trainer_of_a_test" / "main.py"
    assert capsys.readouterr().out == f"__main__ trainer_of_a_test ['{path}', '--lr', '1']\n"
