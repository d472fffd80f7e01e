# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's files, by torch's own writer, as Megatron writes them. May import torch, `protocol` and this package.

Each coordinator of a job writes files of its own, and TensorBoard joins them. A page is followed by a mark that only
this module reads. So a coordinator that takes over finds out what is there, also of a page in the middle of which the
one before was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from megatron_resihp.control.head.logs.own_curves import OwnPage
from megatron_resihp.control.head.logs.writer import MissingPackageError, Term
from megatron_resihp.protocol.logs import BEFORE_ALL, LogPage, Place, TensorBoardWish

MARK: Final = "resihp page "
"""What the mark begins with that a page is there, before its place. It is a note of TensorBoard's own for checkpoints,
which its readers skip."""

Point = tuple[str, int]
"""A tag, as the file has it, and a step."""


@dataclass
class There:
    """What files have.

    Attributes:
        last: the last page that is there whole.
        torn: points of a page after it, which is not.
        own: the last steps of tags, among the points of the last pages.
    """

    last: Place = BEFORE_ALL
    torn: Counter[Point] = field(default_factory=Counter)
    own: dict[str, int] = field(default_factory=dict)


class TensorBoardFiles:
    """The files of one directory."""

    def __init__(self, wish: TensorBoardWish, term: Term) -> None:
        try:
            # An optional package, and torch with it: only where logs are wanted.
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"--tensorboard-dir needs the package tensorboard where the coordinator runs ({error}); "
                "no TensorBoard logs are written"
            ) from None
        suffix = f".{term.run}"
        self._there = there(sorted(Path(wish.directory).glob(f"*{suffix}")))
        self._writer: Any = SummaryWriter(log_dir=wish.directory, max_queue=wish.queue_size, filename_suffix=suffix)

    def write(self, page: LogPage) -> None:
        own = isinstance(page, OwnPage)
        if not own and page.place <= self._there.last:
            return
        for tag, value, step in page.scalars:
            if not self._has(own, tag, step):
                self._writer.add_scalar(tag, value, step, walltime=page.time)
        for tag, text, at in page.texts:
            if not self._has(own, f"{tag}/text_summary", at or 0):
                self._writer.add_text(tag, text, at, walltime=page.time)
        if not own and (page.scalars or page.texts):
            self._there.torn.clear()
            self._writer.file_writer.add_event(_mark(page.place), walltime=page.time)
        # Only then is it known whether the disk has taken them: torch's writer writes in a thread.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _has(self, own: bool, tag: str, step: int) -> bool:
        """Whether a file has a point of this page."""
        if own:
            return step <= self._there.own.get(tag, -1)
        if not self._there.torn[tag, step]:
            return False
        self._there.torn[tag, step] -= 1
        return True


def there(files: Iterable[Path]) -> There:
    """What there is in these files, in their order."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    found, mark = There(), MARK.encode()
    page, after = list[bytes](), list[bytes]()
    """The last whole page, and what follows it. A file may be large, and the rest of it is not parsed."""
    for file in files:
        for record in RawEventFileLoader(str(file)).Load():
            after.append(record)
            if mark in record and (place := _place_in(Event.FromString(record))) is not None:
                found.last, page, after = max(found.last, place), after, []
    found.torn.update(_points(map(Event.FromString, after)))
    for tag, step in _points(map(Event.FromString, [*page, *after])):
        found.own[tag] = max(step, found.own.get(tag, step))
    return found


def _points(events: Iterable[Any]) -> list[Point]:
    return [(value.tag, event.step) for event in events for value in event.summary.value]


def _mark(place: Place) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    said = f"{MARK}{place.call} {place.iteration}"
    return Event(session_log=SessionLog(status=SessionLog.CHECKPOINT, checkpoint_path=said))


def _place_in(event: Any) -> Place | None:
    """The place that a mark names; None: it is none."""
    said: str = event.session_log.checkpoint_path
    return Place(*map(int, said.removeprefix(MARK).split())) if said.startswith(MARK) else None
