# SPDX-License-Identifier: Apache-2.0
"""What a worker prints while its disk is full is lost, and the worker goes on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megatron_resihp.control.node.streams import lenient


def test_a_full_disk_raises_nothing() -> None:
    file = os.open("/dev/full", os.O_WRONLY)
    stream = lenient(file, sys.__stdout__ or sys.stdout)
    print("iteration 7", file=stream, flush=True)
    os.close(file)


def test_what_there_is_room_for_is_written_at_once(tmp_path: Path) -> None:
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    stream = lenient(file, sys.__stdout__ or sys.stdout)
    stream.write("Σ l² ")
    assert (tmp_path / "log").read_text() == "Σ l² "
    stream.writelines(["of iteration", " 7\n"])
    assert (tmp_path / "log").read_text() == "Σ l² of iteration 7\n"
    os.close(file)


def test_other_errors_are_raised() -> None:
    stream = lenient(os.dup(1), sys.__stdout__ or sys.stdout)
    os.close(stream.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        print("iteration 7", file=stream)
