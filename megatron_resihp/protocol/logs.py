# SPDX-License-Identifier: Apache-2.0
"""What Megatron logs for TensorBoard and W&B, on its way from the last rank to the process that writes it.

May import `coding` and this package's types of fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_resihp.protocol.values import Natural, Positive, UnixTime, Worker


@dataclass(frozen=True)
class TensorBoardWish:
    """TensorBoard files are wanted.

    Attributes:
        directory: where; absolute.
        queue_size: of the writer.
    """

    directory: str
    queue_size: Positive


@dataclass(frozen=True)
class WandbWish:
    """A W&B run is wanted.

    Attributes:
        project, name, entity: as W&B calls them; None: its own choice.
        directory: where W&B keeps what it has not sent; absolute.
        config: Megatron's arguments.
        run: the run's id, by which a later process goes on with it.
    """

    project: str
    name: str | None
    entity: str | None
    directory: str
    config: dict[str, Any]
    run: str


@dataclass(frozen=True)
class LogsWanted:
    """The job's first worker says which logs are to be written."""

    worker: Worker
    tensorboard: TensorBoardWish | None
    wandb: WandbWish | None


class Place(NamedTuple):
    """Where in the run a page belongs; pages are written in this order.

    Attributes:
        call: which of the calls that all workers make together: 0 is train(), the others follow it.
        iteration: after which it was logged.
    """

    call: int
    iteration: int


BEFORE_ALL = Place(0, -1)
"""No page has come yet."""


class Scalar(NamedTuple):
    """A point of a curve."""

    tag: str
    value: float
    step: int


class Text(NamedTuple):
    """A text at a step; `step` may be none, as in TensorBoard."""

    tag: str
    text: str
    step: int | None


class WandbRow(NamedTuple):
    """Values of a W&B step; `step` may be none, as in W&B."""

    values: dict[str, float]
    step: int | None


class CheckpointNote(NamedTuple):
    """A checkpoint that W&B is to know of, as an artifact.

    Attributes:
        saved: it was written (False: it was loaded).
        path, directory: it, and what it is in.
        tracker: the file there that names the latest one; None: none was written.
        iteration: of the step after which it was written.
    """

    saved: bool
    path: str
    directory: str
    tracker: str | None
    iteration: int


@dataclass(frozen=True)
class LogPage:
    """All that was logged after one iteration, or in one of the calls after training.

    Attributes:
        call, iteration: its `Place`.
        time: when it was logged.
        scalars, texts: for TensorBoard.
        rows: for W&B.
        config: what was added to the configuration of the W&B run.
        checkpoints: what was saved and loaded, for W&B.
    """

    worker: Worker
    call: Natural
    iteration: Natural
    time: UnixTime
    scalars: tuple[Scalar, ...] = ()
    texts: tuple[Text, ...] = ()
    rows: tuple[WandbRow, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    checkpoints: tuple[CheckpointNote, ...] = ()

    @property
    def place(self) -> Place:
        return Place(self.call, self.iteration)
