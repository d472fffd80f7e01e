# SPDX-License-Identifier: Apache-2.0
"""`resihp replay`: says what a job's coordinator decided, and whether it would decide the same again.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any, Final

from megatron_resihp.control.coordination.actions import Action, Log, Notify, Reply
from megatron_resihp.control.coordination.decisions.entries import Snapshot, Step
from megatron_resihp.control.coordination.decisions.reading import UnusableError
from megatron_resihp.control.coordination.decisions.replay import DifferenceError, Replay
from megatron_resihp.control.head.decision_logs import decisions_at
from megatron_resihp.control.terminal import say, warn

LONGEST: Final = 100
"""Characters of a text that are shown."""
DIFFERS: Final = 1
UNUSABLE: Final = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp replay`."""
    parser.add_argument("place", metavar="RUN_DIR", help="run directory of the job, which may still run; or where "
        "launch --control had its decisions kept")  # fmt: skip
    parser.add_argument("--steps", action="store_true", help="print every step, including those that changed nothing")


def run(namespace: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; the exit code is 0, 1 if the replay differs or steps are missing, or 2."""
    try:
        found = decisions_at(namespace.place)
    except UnusableError as error:
        warn(f"resihp: {error}")
        return UNUSABLE
    try:
        for step, actions in Replay(found.start).fold(found.steps):
            if namespace.steps or any(not isinstance(action, Log) for action in actions):
                say(_line(step, actions))
    except DifferenceError as error:
        warn(f"resihp: {error}")
        return DIFFERS
    if isinstance(found.start, Snapshot):
        say(f"resihp: the log starts with what steps 1 to {found.start.number} have led to")
    say(f"resihp: {len(found.steps)} steps, and the replay decides in each what the run decided")
    if found.problem:
        warn(f"resihp: {found.problem}")
    return DIFFERS if found.problem else 0


def _line(step: Step, actions: list[Action]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(step.now)) + f"{step.now % 1:.3f}"[1:]
    failed = [f"fails with {step.error}"] if step.error else []
    return f"{at} {step.number}: {_words(step.fed)} -> {'; '.join([*map(_done, actions), *failed]) or 'nothing'}"


def _done(action: Action) -> str:
    match action:
        case Log(event):
            return f"log {_words(event)}"
        case Notify(notice):
            return f"tell all {_words(notice)}"
        case Reply(_, answer):
            return f"answer {_words(answer)}"
        case _:
            return _words(action)


def _words(value: Any) -> str:
    """A dataclass: its name, and those of its fields that can be said in a few words."""
    fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    said = [f"{name}={_short(each)}" for name, each in fields if _is_short(each)]
    return f"{type(value).__name__}({', '.join(said)})"


def _is_short(value: Any) -> bool:
    match value:
        case tuple():
            return bool(value) and all(isinstance(each, int) for each in value)
        case bool() | float() | str():
            return bool(value)
        case _:
            return isinstance(value, int)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
