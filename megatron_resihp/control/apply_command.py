"""`resihp apply`: asks a running job to take a given plan.

May import: the standard library and this room's modules.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron_resihp.control import contact
from megatron_resihp.control.store import StoreError

EPILOG = """\
The plan says who works where; whoever is alive beside becomes a standby. PLAN.json holds a plan as events and
proposals do, or is what `resihp plan --json` prints:

  resihp plan runs/my-run --slow 5=0.5 --json > plan.json
  resihp apply runs/my-run plan.json
"""


class InputError(Exception):
    """A file that holds no plan, or several; the message is one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp apply`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="of the job")
    parser.add_argument("plan", type=Path, metavar="PLAN.json", help="the plan to take")
    parser.add_argument("--strategy", metavar="NAME", help="whose plan, where the file has those of several strategies")


def run(namespace: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; the exit code is 0, or 2 where nothing is changed."""
    try:
        plan = read_plan(namespace.plan, namespace.strategy)
        message = {"type": "apply", "plan": plan, "why": f"asked for by hand: {namespace.plan.name}"}
        answer = contact.ask(contact.reach(namespace.run_dir), message)
    except (InputError, StoreError, TimeoutError) as error:
        print(f"resihp: {error}", file=sys.stderr)
        return 2
    if "refused" in answer:
        print(f"resihp: {answer['refused']}", file=sys.stderr)
        return 2
    for line in answer["changes"]:
        print(f"  {line}")
    print(f"resihp: {answer['done']}")
    return 0


def read_plan(path: Path, strategy: str | None) -> Any:
    """The plan's JSON in a file: a plan, an object with a "plan", or what `resihp plan --json` prints.

    Raises:
        InputError: there is none, or it isn't clear which.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from None
    except ValueError:
        raise InputError(f"{path} is no JSON; give a plan, or what `resihp plan --json` prints") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} holds no plan")
    if "strategies" in data:
        data = _answer_of(data["strategies"], strategy, path)
    plan = data if "replicas" in data else data.get("plan")
    if plan is None:
        raise InputError(f"{path} holds no plan{': ' + data['no_plan'] if 'no_plan' in data else ''}")
    return plan


def _answer_of(answers: dict[str, Any], strategy: str | None, path: Path) -> dict[str, Any]:
    names = ", ".join(answers)
    if strategy is None and len(answers) != 1:
        raise InputError(f"{path} has plans of several strategies; choose one with --strategy: {names}")
    name = strategy or next(iter(answers))
    if name not in answers:
        raise InputError(f"{path} has no plan of strategy {name}; it has {names}")
    answer: dict[str, Any] = answers[name]
    return answer
