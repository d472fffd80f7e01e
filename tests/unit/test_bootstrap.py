"""How a worker whose script raises an error ends."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.control import bootstrap

ECC, ILLEGAL_ADDRESS = 214, 700


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize(
    ("code", "end"),
    ((ECC, [("kill", signal.SIGKILL)]), (ILLEGAL_ADDRESS, [("told", "failed"), ("exit", 1)]),
     (None, [("told", "failed"), ("exit", 1)])),
    ids=("device", "script on the device", "script"),
)  # fmt: skip
def test_who_dies_and_who_fails(monkeypatch: pytest.MonkeyPatch, code: int | None, end: list[Any]) -> None:
    """The death of a worker is recovered from; an error of the script ends the job."""
    seen: list[Any] = []

    def run(command: Sequence[str]) -> None:
        error = torch.AcceleratorError("CUDA error")
        if code is not None:
            error.error_code = code  # as torch does
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
    monkeypatch.setattr(bootstrap, "_tell", lambda **message: seen.append(("told", message["type"])))
    monkeypatch.setattr(bootstrap.os, "kill", kill)
    monkeypatch.setattr(bootstrap.os, "_exit", leave)
    with pytest.raises(Ended):
        bootstrap.main(["script.py"])
    assert seen == end
