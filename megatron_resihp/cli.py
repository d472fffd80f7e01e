"""The `resihp` command: its sub-commands, and how they are wired together.

May import: every room; the rooms of a sub-command only when it is asked for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_resihp.control import apply_command, drill_command, launcher


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = _parser()
    namespace = parser.parse_args(argv)
    if namespace.command is None:
        parser.print_help()
        return 2
    try:
        return int(namespace.run(namespace))
    except KeyboardInterrupt:
        print("resihp: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resihp", description="Keeps a Megatron-LM training job running in place when workers die."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    launch = commands.add_parser("launch", help="start a training script on this node and keep the job running")
    launcher.add_arguments(launch)
    launch.set_defaults(run=lambda namespace: launcher.run(namespace, RunReport))
    drill = commands.add_parser("drill", help="slow a worker or a link of a running job, or end that")
    drill_command.add_arguments(drill)
    drill.set_defaults(run=drill_command.run)
    apply = commands.add_parser("apply", help="ask a running job to take a given plan")
    apply_command.add_arguments(apply)
    apply.set_defaults(run=apply_command.run)
    _add_report(commands.add_parser("report", help="say what happened in a run, from its event log"))
    _add_detect(commands.add_parser("detect", help="say who was slow, from a run's records or a table of times"))
    _add_plan(commands.add_parser("plan", help="say how a job should go on when workers are dead or slow"))
    _add_simulate(commands.add_parser("simulate", help="say what strategies make of failures on a simulated cluster"))
    return parser


def _add_report(parser: argparse.ArgumentParser) -> None:
    from megatron_resihp.report import command

    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


def _add_detect(parser: argparse.ArgumentParser) -> None:
    from megatron_resihp.report import detect_command

    detect_command.add_arguments(parser)
    parser.set_defaults(run=detect_command.run)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    from megatron_resihp.report import plan_command

    plan_command.add_arguments(parser)
    parser.set_defaults(run=plan_command.run)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    from megatron_resihp.report import simulate_command

    simulate_command.add_arguments(parser)
    parser.set_defaults(run=simulate_command.run)


class RunReport:
    """Where a run's events go: its log, and the terminal."""

    def __init__(self, run_dir: Path) -> None:
        from megatron_resihp.report.events import FILE_NAME, EventLog
        from megatron_resihp.report.progress import Progress

        self._log = EventLog(run_dir / FILE_NAME)
        self._progress: Progress | None = Progress(sys.stdout)

    def write(self, event: dict[str, Any]) -> None:
        self._log.write(event)
        try:
            if self._progress is not None:
                self._progress.feed(event)
        except OSError:
            # Whoever read our output is gone; the log goes on.
            self._progress = None

    def finish(self) -> None:
        """Close the log and print what it says of the whole run."""
        from megatron_resihp.report.events import read_events
        from megatron_resihp.report.summary import summarize
        from megatron_resihp.report.terminal import console_for, render

        self._log.close()
        if self._progress is not None:
            self._progress.close()
        found = read_events(self._log.path)
        render(summarize(found.events, len(found.malformed) + found.truncated), console_for(sys.stdout))


if __name__ == "__main__":
    sys.exit(main())
