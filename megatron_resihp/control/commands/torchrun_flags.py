# SPDX-License-Identifier: Apache-2.0
"""torchrun's flags: those that `resihp launch` has too, in torchrun's other spelling, and what to give for the rest.

May import: the standard library.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Final

NO_NEED: Final = "leave it out"
COORDINATOR: Final = "give --coordinator HOST:PORT, node 0's address, on all nodes of several, and --node-rank on each"
INSTEAD: Final[Mapping[str, str]] = {
    "--rdzv-endpoint": COORDINATOR, "--rdzv-backend": COORDINATOR, "--rdzv-id": COORDINATOR,
    "--rdzv-conf": COORDINATOR, "--master-addr": COORDINATOR, "--master-port": COORDINATOR,
    "--standalone": f"one node is the default; {NO_NEED}",
    "--log-dir": "logs go to --run-dir DIR", "--redirects": "give --logs file", "--tee": "give --logs both",
    "--local-ranks-filter": "give --logs file",
    "--local-addr": NO_NEED, "--role": NO_NEED, "--start-method": NO_NEED, "--monitor-interval": NO_NEED,
    "--module": "give the script's path", "--no-python": "give a Python script", "--run-path": NO_NEED,
}  # fmt: skip
"""For each flag of torchrun that there is not, what to do; the names are those with dashes."""


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        assert option is not None
        parser.error(f"{option} is torchrun's: {INSTEAD[option.replace('_', '-')]}")


def add_spellings(parser: argparse.ArgumentParser, kinds: Mapping[str, Callable[[str], Any]]) -> None:
    """Let flags that the parser has be written with underscores too; help does not show them.

    Args:
        kinds: how the value of each is read, by its name with underscores.
    """
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_refusals(parser: argparse.ArgumentParser) -> None:
    """Have torchrun's other flags refused with what to give instead."""
    for name in INSTEAD:
        spellings = dict.fromkeys([name, f"--{name.removeprefix('--').replace('-', '_')}"])
        parser.add_argument(*spellings, action=_Refuse, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
