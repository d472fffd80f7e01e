# SPDX-License-Identifier: Apache-2.0
"""State machines whose steps are remembered, to be replayed once a test is over: see conftest.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_resihp.control.coordination.decisions.entries import (
    ENTRIES,
    Began,
    Entry,
    Snapshot,
    Step,
    line_of,
)
from megatron_resihp.control.coordination.decisions.recorded import Recorded
from megatron_resihp.control.coordination.decisions.replay import Replay

_runs: list[tuple[Recorded, list[str]]] = []


def recorded(*arguments: Any) -> Recorded:
    """As `Recorded`, of the test that runs."""
    lines: list[str] = []
    _runs.append((Recorded(*arguments, write=lines.extend), lines))
    return _runs[-1][0]


def replay_all() -> None:
    """Replay what has been recorded; each replay decides the same, and knows the same in the end, as a snapshot."""
    runs = list(_runs)
    _runs.clear()
    for run, lines in runs:
        run.write_down()
        again = replay(entries_in(lines))
        job = run.state.job
        again.progressed(job.reached, job.pages.last)  # which the next step would have told
        assert known(again.state) == known(run.state)
        [snapshot] = entries_in([run.snapshot()])
        assert isinstance(snapshot, Snapshot) and snapshot.number == len(lines) - 1
        assert known(Replay(snapshot).membership.state) == known(run.state)


def entries_in(lines: Sequence[str]) -> list[Entry]:
    """What lines of a log hold."""
    return [ENTRIES.read(line).body for line in lines]


def replay(entries: Sequence[Entry]) -> Any:
    """Replay one job from its entries, as a file would hold them; returns the state machine.

    Raises:
        DifferenceError: it decides otherwise.
    """
    began, *steps = entries_in([line_of(entry) for entry in entries])
    assert isinstance(began, Began) and all(isinstance(step, Step) for step in steps)
    again = Replay(began)
    for _ in again.fold(steps):  # type: ignore[arg-type]
        pass
    return again.membership


def known(value: Any) -> Any:
    """All that a state holds, but for functions. A list is as good as a tuple, which is what a file gives."""
    match value:
        case dict():
            return {key: known(each) for key, each in value.items()}
        case list() | tuple():
            return [known(each) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {name: known(each) for name, each in fields if not callable(each)}
