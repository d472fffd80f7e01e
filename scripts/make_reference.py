#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print docs/reference.md: commands, flags of the job, strategies and public names, as the code has them.

    scripts/make_reference.py > docs/reference.md

Imports only light modules of the package.
"""

import argparse
import inspect
import re
from collections.abc import Iterator

import megatron_resihp
from megatron_resihp import config
from megatron_resihp.cli import command_parser
from megatron_resihp.planner.strategies.registry import STRATEGIES

INTRODUCTION = """\
# Reference

<!-- Written by `scripts/make_reference.py > docs/reference.md`; edit the help texts in the code instead. -->

Generated from the code. [Usage](usage.md) explains it, [events](events.md) has the event log, and
[stability](stability.md) says which of it will stay."""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_commands(), *_job_flags(), *_strategies(), *_python(), ""])


def _commands() -> Iterator[str]:
    yield "\n## Commands"
    yield from _command(command_parser(), "")


def _command(parser: argparse.ArgumentParser, summary: str) -> Iterator[str]:
    if summary:
        yield f"\n### `{parser.prog}`\n\n{_sentence(summary)}"
    rows = [_row(action, parser) for action in parser._actions if _is_shown(action)]
    if rows:
        yield "\n| argument | meaning |\n| --- | --- |"
        yield from rows
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, below in action.choices.items():
                yield from _command(below, helps.get(name, name))


def _is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not isinstance(
        action, argparse._HelpAction | argparse._SubParsersAction
    )


def _row(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    value = "" if action.nargs == 0 else metavar or "|".join(map(str, action.choices or ())) or action.dest
    names = ", ".join(action.option_strings)
    argument = f"{names} {value}".strip()
    if action.nargs in ("+", "*", argparse.REMAINDER):
        argument += " ..."
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"| `{_cell(argument)}` | {_cell(text)} |"


def _job_flags() -> Iterator[str]:
    yield "\n## Flags of the job\n\nThey stand among Megatron's own.\n\n| flag | meaning |\n| --- | --- |"
    parser = config.add_arguments(argparse.ArgumentParser(prog="pretrain_gpt.py", add_help=False))
    yield from (_row(action, parser) for action in parser._actions if _is_shown(action))


def _strategies() -> Iterator[str]:
    yield "\n## Strategies\n"
    yield "| name | what it does | how the job gets to its plans | reacts to |\n| --- | --- | --- | --- |"
    for name, entry in STRATEGIES.items():
        yield f"| `{name}` | {_cell(entry.summary)} | {entry.change} | {entry.reacts_to} |"


def _python() -> Iterator[str]:
    yield "\n## Python"
    documented = inspect.cleandoc(megatron_resihp.enable.__doc__ or "")
    yield f"\n### `megatron_resihp.enable()`\n\n```text\n{documented}\n```"
    yield "\n### `megatron_resihp.__version__`\n\nThe version, a string."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
