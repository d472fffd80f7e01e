# SPDX-License-Identifier: Apache-2.0
"""The `resihp` command: its sub-commands and their wiring.

May import: every package; the packages of a sub-command only when it runs.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import megatron_resihp
from megatron_resihp.control.commands import (
    apply,
    checkpoint,
    coordinator_command,
    drain,
    inject,
    replay,
    stop,
)
from megatron_resihp.control.commands.launch import launch_options, launcher
from megatron_resihp.control.streams import let_no_output_end_this
from megatron_resihp.extras import missing
from megatron_resihp.report.live.run_report import RunReport

if TYPE_CHECKING:
    from megatron_resihp.planner.strategies.registry import Entry

NEED_TORCH: Final = frozenset({"launch", "check", "health", "inject", "apply", "drain", "stop"})
"""Commands that need the extra `train`. Scripts may bring their own Megatron."""
GO_ON_UNREAD: Final = frozenset({"launch", "coordinator", "health", "replay"})
"""Commands that matter for what they do, or for their exit code: they do it though nobody takes what they print."""
TAKE_SCRIPT: Final = ("launch", "check")
"""Commands whose last arguments are a script's."""
SCRIPTS: Final = ("pretrain_gpt.py", "make_dataset.py")
"""Scripts that come with the package."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = command_parser()
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.exit(2, f"resihp: {_of_unknown(namespace.command, unknown)}\n")
    if namespace.command is None:
        parser.print_help()
        return 2
    if namespace.command in GO_ON_UNREAD:
        let_no_output_end_this()
    if namespace.command in NEED_TORCH and (problem := missing(["torch"])):
        print(f"resihp: {problem}", file=sys.stderr)
        return 2
    try:
        return _left(int(namespace.run(namespace)))
    except KeyboardInterrupt:
        print("resihp: interrupted", file=sys.stderr)
        return 130


def _of_unknown(command: str | None, words: Sequence[str]) -> str:
    """What to say of words that a command doesn't take."""
    said = f"{' '.join(words)}: not an option of {f'resihp {command}' if command else 'resihp'}"
    if command in TAKE_SCRIPT:
        return f"{said}; Megatron's flags stand after the script, and resihp {command} --help lists what stands before"
    return f"{said}; see --help"


class _CommandParser(argparse.ArgumentParser):
    """Says what is wrong in one line: that of all options, which argparse prints above it, fills a terminal."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"resihp: {message}{_hint(message)}; see {self.prog} --help\n")


def _hint(message: str) -> str:
    """A flag whose value a shell has lost takes the next word for it, or finds none."""
    lost = "expected one argument" in message or re.search(r"value: '([^']*\.py)?'", message)
    return " (an unset shell variable?)" if lost else ""


def _left(code: int) -> int:
    """The exit code; the process ends here if a log's writer still waits: W&B's exit hook has no bound."""
    if "megatron_resihp.control.head.logs.lane" in sys.modules:
        from megatron_resihp.control.head.logs.lane import any_left

        if any_left():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return code


def command_parser() -> argparse.ArgumentParser:
    """The parser of `resihp`; scripts/make_reference.py writes a page from it."""
    from megatron_resihp.health import command as health_command
    from megatron_resihp.integration.check import command as check_command
    from megatron_resihp.integration.emergency import command as emergency_command
    from megatron_resihp.report.detect import command as detect_command
    from megatron_resihp.report.plan import command as plan_command
    from megatron_resihp.report.run import command as report_command
    from megatron_resihp.report.simulate import command as simulate_command

    parser = argparse.ArgumentParser(
        prog="resihp",
        description="Keeps a Megatron-LM training job running in place when workers die, slow down or come back.",
    )
    parser.add_argument("--version", action=_Version, help="print this package's and its dependencies' versions")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_CommandParser)
    launch = _parser(commands, "launch", "start a training script on this node and keep the job running")
    launch_options.add_arguments(launch)
    launch.epilog = launch_options.EPILOG
    launch.set_defaults(run=lambda namespace: launcher.run(namespace, RunReport))
    coordinator = _parser(
        commands, "coordinator", "run a job's coordinator apart from its nodes, so that the job outlives any of them"
    )
    coordinator_command.add_arguments(coordinator)
    coordinator.set_defaults(run=lambda namespace: coordinator_command.run(namespace, RunReport))
    _add(commands, "check", check_command, "check whether a job would be accepted, and which losses it would survive")
    _add(commands, "health", health_command, "check whether this node is fit to join a job")
    _add(commands, "inject", inject, "slow a worker or a link of a running job, or end a slowdown")
    _add(commands, "apply", apply, "ask a running job to change to a given plan")
    _add(
        commands, "drain", drain, "take nodes or workers out of a running job gracefully; the job goes on without them"
    )
    _add(commands, "stop", stop, "end a running job gracefully after an iteration")
    _add(commands, "checkpoint", checkpoint, "say how to continue from the state that a job's survivors saved")
    _add(commands, "emergency", emergency_command, "make a checkpoint from the parts that a job's survivors saved")
    _add(
        commands,
        "replay",
        replay,
        "show what a job's coordinator decided, and check that it would decide the same again",
    )
    _add(commands, "report", report_command, "summarize a run from its event log")
    _add(commands, "detect", detect_command, "say which workers were slow, from a run's records or a table of times")
    _add(commands, "plan", plan_command, "find the best plan for a job with dead or slow workers")
    _add(commands, "simulate", simulate_command, "compare strategies under failures on a simulated cluster")
    commands.choices["simulate"].set_defaults(published=_published_experiments, baselines=_baselines)
    commands.choices["plan"].set_defaults(baselines=_baselines)
    script = _parser(commands, "script", "print the path of a script that comes with this package")
    script.add_argument("name", choices=SCRIPTS, help="for example: resihp launch $(resihp script pretrain_gpt.py)")
    script.set_defaults(run=_say_where_script_is)
    return parser


def _published_experiments() -> ModuleType:
    from megatron_resihp.lab import scenarios

    return scenarios


def _baselines() -> Mapping[str, Entry]:
    from megatron_resihp.lab.strategies import FOR_SHARERS

    return FOR_SHARERS


def _say_where_script_is(namespace: argparse.Namespace) -> int:
    """Print a script's path: scripts are beside this file in the wheel, and beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    places = (folder / "scripts" / namespace.name for folder in (package, package.parent))
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        print(f"resihp: this installation has no {namespace.name}; reinstall megatron-resihp", file=sys.stderr)
        return 2
    print(found)
    return 0


class _Version(argparse.Action):
    """Prints the versions, which are looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        found = [f"megatron-resihp {megatron_resihp.__version__}"]
        for name in ("megatron-core", "torch"):
            try:
                found.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                found.append(f"{name} is not installed")
        print(", ".join([*found, f"Python {platform.python_version()}"]))
        parser.exit()


def _add(commands: Any, name: str, module: ModuleType, what: str) -> None:
    """Add a sub-command whose module has `add_arguments` and `run`."""
    parser = _parser(commands, name, what)
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


def _parser(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    """A sub-command's parser, whose own help says what it does, too."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
