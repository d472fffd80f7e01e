# SPDX-License-Identifier: Apache-2.0
"""A launcher whose terminal is gone, or whose output is on a full disk, goes on, and its exit code is the job's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LAUNCHER = """
import sys, traceback
from megatron_resihp import cli
from megatron_resihp.control.commands import coordinator_command
from megatron_resihp.control.commands.launch import launcher
from megatron_resihp.control.terminal import say, warn

def run(*_):
    try:
        raise ValueError("in a thread")
    except ValueError:
        traceback.print_exc()
    print("one", flush=True), say("two"), warn("three")
    print("four")
    return 75

launcher.run = coordinator_command.run = run
sys.exit(cli.main(sys.argv[1:]))
"""
COMMANDS = {"launch": ["launch", "train.py"], "coordinator": ["coordinator", "--nnodes", "2", "--run-dir", "run"]}
OUT, ERROR = "one\ntwo\nfour\n", "ValueError: in a thread\nthree\n"


@contextmanager
def unwritable(how: str) -> Iterator[int]:
    """A file that takes nothing."""
    if how == "a full disk":
        file = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, file = os.pipe()
        os.close(reader)
    yield file
    os.close(file)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("how", ["a full disk", "no reader"])
def test_what_nobody_takes_is_dropped(how: str, stream: str, command: str) -> None:
    with unwritable(how) as file:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: file}
        words = [sys.executable, "-c", LAUNCHER, *COMMANDS[command]]
        done = subprocess.run(words, text=True, timeout=60.0, **streams)  # type: ignore[call-overload]
    assert done.returncode == 75
    if stream == "stdout":
        assert done.stderr.endswith(ERROR)
    else:
        assert done.stdout == OUT


def test_a_command_whose_output_is_its_result_fails_without_it() -> None:
    with unwritable("a full disk") as file:
        words = [sys.executable, "-m", "megatron_resihp.cli", "script", "pretrain_gpt.py"]
        done = subprocess.run(words, stdout=file, stderr=subprocess.PIPE, timeout=60.0)
    assert done.returncode != 0
