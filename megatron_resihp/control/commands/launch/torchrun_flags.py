# SPDX-License-Identifier: Apache-2.0
"""torchrun's flags and its PET_ variables, so that `resihp launch` can take torchrun's place in a script.

`rendezvous` and `launch_options` say what those that have a counterpart mean here. May import: the standard library.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Kind = Callable[[str], Any]
"""Reads the text of a value."""


def switch(text: str) -> bool:
    """A flag without a value, as its PET_ variable says it; torchrun's own reading."""
    return bool(int(text))


OURS: Final[Mapping[str, Kind]] = {"nnodes": str, "nproc_per_node": str, "node_rank": int, "max_restarts": int}
"""Flags that `resihp launch` has itself."""
HONOURED: Final[Mapping[str, Kind]] = {
    "rdzv_backend": str, "rdzv_endpoint": str, "rdzv_id": str, "rdzv_conf": str, "standalone": switch,
    "master_addr": str, "master_port": int, "log_dir": str, "redirects": str, "tee": str, "module": switch,
}  # fmt: skip
"""Flags that have a counterpart."""
WITHOUT_EFFECT: Final[Mapping[str, Kind]] = {
    "monitor_interval": str, "start_method": str, "role": str, "local_addr": str, "shutdown_timeout": str,
    "log_line_prefix_template": str, "run_path": switch, "use_env": switch,
}  # fmt: skip
"""Flags of how torchrun itself works. Workers here are fresh processes whose exit the kernel reports at once, each runs
the script in its own interpreter, and lines of output are marked with the worker."""


@dataclass(frozen=True)
class _Missed:
    """A flag whose user would miss something.

    Attributes:
        usual: torchrun's default, with which nothing is asked for.
        instead: what to do.
    """

    instead: str
    usual: str | None = None
    kind: Kind = str


MISSED: Final[Mapping[str, _Missed]] = {
    "no_python": _Missed("give a Python script", kind=switch),
    "virtual_local_rank": _Missed("a worker finds its GPU by LOCAL_RANK; leave it out", kind=switch),
    "numa_binding": _Missed("bind the launcher, with numactl for example"),
    "event_log_handler": _Missed("RUN_DIR/events.jsonl has the events; leave it out", "null"),
    "logs_specs": _Missed("give --logs file, prefix or both"),
    "local_ranks_filter": _Missed("give --logs file, and read RUN_DIR/logs/worker_N.log", ""),
    "duplicate_stdout_filters": _Missed("search RUN_DIR/logs", ""),
    "duplicate_stderr_filters": _Missed("search RUN_DIR/logs", ""),
    "signals_to_handle": _Missed(
        "the launcher acts on SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 for all workers; leave it out",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    "print_completion": _Missed("leave it out"),
}
_SHORT: Final = {"module": "-m", "redirects": "-r", "tee": "-t"}
_KINDS: Final = {**HONOURED, **WITHOUT_EFFECT, **{name: missed.kind for name, missed in MISSED.items()}}


class TorchrunError(ValueError):
    """A flag can't be read, or what it asks for is missing here; the message is "cause; mend"."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add torchrun's flags, in both of its spellings; help does not show them."""
    for name in OURS:
        if "_" in name:
            parser.add_argument(f"--{name}", type=OURS[name], default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name, kind in _KINDS.items():
        spellings = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"])
        spellings.update({_SHORT[name]: None} if name in _SHORT else {})
        how: dict[str, Any] = {"action": "store_const", "const": True} if kind is switch else {"type": kind}
        parser.add_argument(*spellings, dest=name, default=None, help=argparse.SUPPRESS, **how)


def said(namespace: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """What is said by flags or else by PET_ variables, by torchrun's names.

    Raises:
        TorchrunError: a variable can't be read, or the user would miss something.
    """
    found = {name: value for name in (*OURS, *_KINDS) if (value := getattr(namespace, name)) is not None}
    for name, kind in {**OURS, **_KINDS}.items():
        text = environment.get(f"PET_{name.upper()}")
        if name not in found and text is not None:
            try:
                found[name] = kind(text)
            except ValueError:
                raise TorchrunError(f"PET_{name.upper()}={text} is not a number; unset it, or give one") from None
    for name, missed in MISSED.items():
        if found.get(name, missed.usual) not in (None, False, missed.usual):
            raise TorchrunError(f"--{name.replace('_', '-')} of torchrun is not supported; {missed.instead}")
    return found
