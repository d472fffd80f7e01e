# SPDX-License-Identifier: Apache-2.0
"""What `resihp check` has found, as lines for people and as JSON. Imports the standard library and `losses`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megatron_resihp.control.coordination.exposure import SPREAD
from megatron_resihp.cost.crossing import Crossing
from megatron_resihp.cost.room import gib
from megatron_resihp.integration.check.losses import Outlook, Sent


@dataclass(frozen=True)
class Findings:
    """Attributes:
    job: what was asked about, in words.
    refusals: a line for each thing that keeps the job out, "cause; mend".
    environment: a line for each variable that is overruled, or does harm.
    given_up: a line for each overlap that the job would never have.
    without_overlap: a line for each overlap that the job would lack sometimes.
    unknown: flags that neither Megatron's parser nor the script's text has.
    notes: what else a user should know.
    outlook: what becomes of the job when something is lost; None: that can't be told.
    """

    job: str
    refusals: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()
    without_overlap: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    outlook: Outlook | None = None

    @property
    def let_in(self) -> bool:
        return not self.refusals

    def as_json(self) -> dict[str, Any]:
        """Everything; refusals are divided into flag, reason and fix."""
        return {**asdict(self), "let_in": self.let_in, "refusals": [_divided(line) for line in self.refusals]}

    def lines(self) -> Iterator[str]:
        """A page for the terminal; the last line says whether the job would be let in."""
        yield self.job
        yield from _section("environment", self.environment)
        yield from _section("without overlap", self.given_up + self.without_overlap)
        yield from _section("unknown to Megatron; the script may define it", self.unknown)
        if self.outlook is not None:
            yield from _section("losses", tuple(told_of_losses(self.outlook)))
            yield from _section("between nodes", tuple(told_of_traffic(self.outlook.sent)))
            yield from _section("memory", tuple(told_of_memory(self.outlook)))
        yield from _section("notes", self.notes)
        yield from _section("refused", self.refusals)
        number = len(self.refusals)
        why = f"{number} reason{'s' if number > 1 else ''}, see above"
        accepted = f"the job would be accepted{_if_defined(self.unknown)}; {_changed(self.given_up)}"
        end = accepted if self.let_in else f"the job would be refused: {why}"
        yield f"resihp: {end}"


def _changed(given_up: tuple[str, ...]) -> str:
    """Which flags the job would not follow."""
    flags = [line.partition(":")[0] for line in given_up]
    return f"it would run without {' and '.join(flags)}" if flags else "no flag is changed"


def _if_defined(unknown: tuple[str, ...]) -> str:
    """A script that doesn't define a flag ends on it."""
    if not unknown:
        return ""
    flags = [line.split()[0] for line in unknown]
    more = f" and {len(flags) - 3} more" if len(flags) > 3 else ""
    return f" if the script defines {', '.join(flags[:3])}{more}"


def told_of_losses(outlook: Outlook) -> Iterator[str]:
    """What ends the job."""
    yield outlook.losses
    reasons = list(outlook.without_plan.items())
    for lost, why in reasons[:3]:
        yield f"no plan after the loss of {lost}: {why}"
    if len(reasons) > 3:
        yield f"nor after {len(reasons) - 3} other kinds of losses"


def told_of_traffic(sent: Sent | None) -> Iterator[str]:
    """What crosses nodes, and what that would be in the other layout."""
    if sent is None:
        return
    yield _layout("in Megatron's order of ranks", sent.unspread)
    if sent.refused_with is not None:
        yield f"{SPREAD} is refused with {sent.refused_with}"
        return
    if sent.losses is None:
        yield f"{SPREAD} changes nothing here"
        return
    yield f"{_layout(f'with {SPREAD}', sent.spread)}{'' if sent.asked else f'; {sent.losses}'}"


def _layout(name: str, sent: Crossing) -> str:
    most = f"{gib(sent.gradients)} of gradients and {gib(sent.results)} of stages' results"
    return f"{name}: the busiest node sends others {most} in an iteration"


def told_of_memory(outlook: Outlook) -> Iterator[str]:
    """Whether it fits."""
    if outlook.first is None:
        yield f"not known: {outlook.unknown}"
        return
    yield _fits("the first plan takes", None, outlook.first, outlook.usable)
    if outlook.after is not None:
        yield _fits("the plan after it takes", *outlook.after, outlook.usable)
    if outlook.changing is not None:
        yield _fits("old and new state together take at most", *outlook.changing, outlook.usable)
    if outlook.usable is None:
        yield "give --memory-gib GIB, of each GPU, to compare"


def _fits(what: str, lost: str | None, use: Any, usable: int | None) -> str:
    said = f"{f'loss of {lost}: ' if lost else ''}{what} {use}"
    if usable is None:
        return said
    return f"{said}; {'fits' if use.bytes <= usable else 'DOES NOT FIT'}: {gib(usable)} may be used"


def _section(title: str, lines: tuple[str, ...]) -> Iterator[str]:
    if lines:
        yield f"{title}:"
        yield from (f"  {line}" for line in lines)


def _divided(line: str) -> dict[str, str]:
    reason, _, fix = line.rpartition("; " if "; " in line else ": ")
    flag = line.split()[0].rstrip(":") if line.startswith("--") else ""
    return {"flag": flag, "reason": reason or line, "fix": fix if reason else ""}
