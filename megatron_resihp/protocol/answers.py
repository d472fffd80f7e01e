# SPDX-License-Identifier: Apache-2.0
"""What the coordinator answers commands that wait for it. May import this package's other modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from megatron_resihp.protocol.wire import Kinds


@dataclass(frozen=True)
class Accepted:
    """What was asked for is done or begins: a line of text, and what it changes, line by line."""

    line: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """What was asked for can't be; one line says why."""

    reason: str


Answer = Accepted | Refused
ANSWERS = Kinds[Answer](get_args(Answer), "an answer")
