# SPDX-License-Identifier: Apache-2.0
"""What stands for the writers of TensorBoard and W&B on the worker that logs: it only takes notes, for node 0 to write.

Methods are those of torch's SummaryWriter and of W&B that Megatron calls. May import `protocol`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_resihp.protocol.logs import CheckpointNote, Scalar, Text, WandbRow


@dataclass
class Notes:
    """What has been logged since the last page."""

    scalars: list[Scalar] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    rows: list[WandbRow] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[CheckpointNote] = field(default_factory=list)


def number_in(value: Any) -> float | None:
    """What a curve shows of a value, a tensor perhaps; None: nothing."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


class _Unknown:
    """Says once of each method that node 0 doesn't write what it is given."""

    def __init__(self, writer: str) -> None:
        self._writer = writer
        self._said: set[str] = set()

    def method(self, name: str) -> Callable[..., None]:
        def skip(*positional: Any, **options: Any) -> None:
            if name not in self._said:
                self._said.add(name)
                print(f"resihp: {self._writer}'s {name} is not written with --resihp", file=sys.stderr, flush=True)

        return skip


class TensorBoardStandIn:
    """Stands for a SummaryWriter."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._unknown = _Unknown("TensorBoard")

    def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None, *others: Any, **options: Any) -> None:
        value = number_in(scalar_value)
        if value is None:
            self._unknown.method(f"add_scalar of {type(scalar_value).__name__}")()
            return
        self._notes.scalars.append(Scalar(str(tag), value, int(global_step or 0)))

    def add_text(self, tag: str, text_string: str, global_step: Any = None, walltime: Any = None) -> None:
        step = None if global_step is None else int(global_step)
        self._notes.texts.append(Text(str(tag), str(text_string), step))

    def flush(self) -> None:
        """Node 0 flushes."""

    def close(self) -> None:
        """Node 0 closes it at the end of the job."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("add_"):
            raise AttributeError(name)
        return self._unknown.method(name)


class _Config:
    """Stands for the configuration of a W&B run."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def update(self, values: Mapping[str, Any], **options: Any) -> None:
        self._notes.config.update(plain(values))


class WandbStandIn:
    """Stands for the module `wandb` with a run."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._unknown = _Unknown("W&B")
        self.config = _Config(notes)

    def log(self, data: Mapping[str, Any], step: Any = None, **options: Any) -> None:
        numbers = {str(name): number_in(value) for name, value in data.items()}
        for name, value in numbers.items():
            if value is None:
                self._unknown.method(f"log of {type(data[name]).__name__}")()
        known = {name: value for name, value in numbers.items() if value is not None}
        self._notes.rows.append(WandbRow(known, None if step is None else int(step)))

    def finish(self, *positional: Any, **options: Any) -> None:
        """Node 0 finishes the run at the end of the job."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._unknown.method(name)


def plain(value: Any) -> Any:
    """A value as JSON can have it; what it can't, in words."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if abs(value) < 1 << 62 else str(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(name): plain(item) for name, item in value.items()}
        case list() | tuple() | set():
            return [plain(item) for item in value]
    return str(value)
