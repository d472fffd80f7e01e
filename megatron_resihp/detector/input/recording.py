# SPDX-License-Identifier: Apache-2.0
"""Stores the records of a run on disk, so that they can be judged again later. Imports `coding`,
`events` and this package.

A file consists of frames: kind, length, payload. A run and each epoch's layout have frames of their own, so a file may
hold several runs; the last one counts. A killed writer leaves an incomplete frame at the end, which readers report and
writers remove.
"""

import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from megatron_resihp.coding import FILE, WrongValueError, decode, encode
from megatron_resihp.detector.input.observations import Layout
from megatron_resihp.events.own_file import in_place_of

FILE_NAME: Final = "iterations.bin"
_MAGIC = b"RIHPREC\x01"
_FRAME = struct.Struct("<BI")


class RecordingError(Exception):
    """The file is no recording; the message is "cause; mend" in one line."""


class _Frame(IntEnum):
    RUN = 1
    LAYOUT = 2
    RECORD = 3


class Recorder:
    """Appends a run to a file. Every method raises OSError if the disk fails."""

    def __init__(self, path: Path, job: Mapping[str, Any], taken_over: bool = False) -> None:
        """Begin.

        Args:
            job: what later readers should know about the job, as JSON.
            taken_over: from a coordinator that may still write the file; see `events.own_file`.

        Raises:
            RecordingError: the file exists and is no recording.
            OSError: the file cannot be opened.
        """
        self._file = in_place_of(path, partial(_copied, path)) if taken_over else path.open("ab+")
        if self._file.tell():
            # An incomplete frame of an earlier run would hide all that follows it.
            self._file.truncate(_scan(self._file, path).end)
        else:
            self._file.write(_MAGIC)
        self._write(_Frame.RUN, json.dumps(job).encode())

    def layout(self, layout: Layout) -> None:
        """An epoch begins."""
        self._write(_Frame.LAYOUT, json.dumps(encode(layout)).encode())

    def message(self, message: bytes) -> None:
        """A packed record arrived."""
        self._write(_Frame.RECORD, message)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, kind: _Frame, payload: bytes) -> None:
        self._file.write(_FRAME.pack(kind, len(payload)) + payload)


def _copied(path: Path, own: Path) -> BinaryIO:
    """A copy of a file, if that is there."""
    try:
        shutil.copyfile(path, own)
    except FileNotFoundError:
        pass
    return own.open("ab+")


class Recording:
    """The last run of a file; iterating gives layouts and messages (see `wire`) as they were written.

    Attributes:
        job: the description of the job, noted when it started.
        cut: whether the last frame was cut off.
    """

    def __init__(self, path: Path) -> None:
        """Raises:
        RecordingError: the file is missing, cannot be read, or is no recording.
        """
        self._path = path
        try:
            with path.open("rb") as file:
                extent = _scan(file, path)
                self.cut = extent.cut
                self._start = extent.run
                self.job = _json(next(_frames(file, extent.run))[1], path) if extent.run else {}
        except OSError as error:
            raise RecordingError(f"{path} cannot be read ({error.strerror}); give the directory of a run") from None

    def __iter__(self) -> Iterator[Layout | bytes]:
        """Raises:
        RecordingError: a layout is damaged.
        """
        with self._path.open("rb") as file:
            for kind, payload in _frames(file, self._start or len(_MAGIC)):
                if kind == _Frame.LAYOUT:
                    yield _layout(_json(payload, self._path), self._path)
                elif kind == _Frame.RECORD:
                    yield payload


class _Extent(NamedTuple):
    """Offsets in a file: the start of its last run (0 if none) and the end of its last whole frame."""

    run: int
    end: int
    cut: bool


def _scan(file: BinaryIO, path: Path) -> _Extent:
    file.seek(0)
    if file.read(len(_MAGIC)) != _MAGIC:
        why = f"{path} is not a recording of this version"
        raise RecordingError(f"{why}; remove it, or give the directory of another run")
    size = file.seek(0, 2)
    run, end = 0, len(_MAGIC)
    while size - end >= _FRAME.size:
        file.seek(end)
        kind, length = _FRAME.unpack(file.read(_FRAME.size))
        if end + _FRAME.size + length > size:
            break
        run = end if kind == _Frame.RUN else run
        end += _FRAME.size + length
    return _Extent(run, end, end < size)


def _frames(file: BinaryIO, start: int) -> Iterator[tuple[int, bytes]]:
    """The whole frames from an offset on."""
    file.seek(start)
    while len(head := file.read(_FRAME.size)) == _FRAME.size:
        kind, length = _FRAME.unpack(head)
        payload = file.read(length)
        if len(payload) < length:
            return
        yield kind, payload


def _json(payload: bytes, path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(payload))
    except (TypeError, ValueError) as error:
        raise RecordingError(f"{path} is damaged ({error}); give the directory of another run") from None


def _layout(data: Mapping[str, Any], path: Path) -> Layout:
    try:
        layout: Layout = decode(Layout, data, FILE)
        if layout.links.size % 2:
            raise WrongValueError("are not pairs", "links")
    except WrongValueError as error:
        raise RecordingError(f"{path} holds a damaged layout ({error}); give the directory of another run") from None
    return replace(layout, links=layout.links.reshape(-1, 2))
