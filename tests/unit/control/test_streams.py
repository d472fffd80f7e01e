# SPDX-License-Identifier: Apache-2.0
"""What a worker prints while its disk is full is lost, and the worker goes on; a launcher loses what nobody takes."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TextIO

import pytest

from megatron_resihp.control.streams import lenient, unfailing


def ordinary(file: int, encoding: str = "utf-8") -> TextIO:
    """As Python itself makes standard output."""
    return open(file, "w", encoding=encoding, errors="strict", closefd=False)


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


def test_other_errors_are_raised_to_a_worker() -> None:
    stream = lenient(os.dup(1), sys.__stdout__ or sys.stdout)
    os.close(stream.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        print("iteration 7", file=stream)


def test_a_launcher_shows_characters_that_its_locale_lacks_as_escapes(tmp_path: Path) -> None:
    """Among them those of a path that is no text."""
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    stream = unfailing(ordinary(file, "ascii"))
    print("Σ of \udcff", file=stream)
    assert (tmp_path / "log").read_text() == "\\u03a3 of \\udcff\n"
    os.close(file)


def test_a_launcher_s_line_is_written_whole_and_a_part_of_one_when_that_is_asked_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    stream = unfailing(ordinary(writer))
    stream.write("iteration ")
    with pytest.raises(BlockingIOError):
        os.read(reader, 99)
    stream.write("7\n")
    assert os.read(reader, 99) == b"iteration 7\n"
    print("iteration 8", end="\r", file=stream, flush=True)
    assert os.read(reader, 99) == b"iteration 8\r"
    os.close(reader)
    os.close(writer)


def test_a_reader_that_is_late_at_a_pipe_that_does_not_block_holds_up_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream = unfailing(ordinary(writer))
    for _ in range(3):
        print("x" * 50_000, file=stream)
    os.close(reader)
    os.close(writer)


def test_a_launcher_that_was_started_without_output_has_one_that_goes_nowhere() -> None:
    with unfailing(None) as stream:
        print("iteration 7", file=stream, flush=True)
        assert not stream.isatty()


def test_a_stream_to_no_file_stays_as_it_is() -> None:
    stream = io.StringIO()
    assert unfailing(stream) is stream
