# SPDX-License-Identifier: Apache-2.0
"""What one row of the support table holds. Imports the standard library only.

A row is about one of Megatron's arguments, by the name that it has among the parsed ones. It is supported if it has
evidence, and refused otherwise.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Evidence(StrEnum):
    """Why it is known that a recovery keeps the contract with this argument."""

    INERT = "inert"
    """It changes nothing that training computes. The place in Megatron shows it."""
    START = "start"
    """It is read before the first step, and says what the job begins with: its data, its weights. A recovery goes on
    from what survivors hold, and does not look at it. A worker that comes back reads it as the first ones did."""
    KERNEL = "kernel"
    """It changes how something is computed: no state, groups, schedule, random streams or number of collectives."""
    TEST = "test"
    """A test holds it."""


def _given(name: str, values: Mapping[str, Any], flags: Mapping[str, str]) -> str:
    """An argument as it stands on the command line, where a switch has no value."""
    return flags[name] if isinstance(values[name], bool) else f"{flags[name]} {values[name]}"


@dataclass(frozen=True)
class Only:
    """Supported with some values only.

    Attributes:
        accepts: whether a value is one of them.
        mend: what to do instead, for a message.
    """

    accepts: Callable[[Any], bool]
    mend: str

    def refusal(self, name: str, values: Mapping[str, Any], flags: Mapping[str, str]) -> str | None:
        if self.accepts(values[name]):
            return None
        return f"{_given(name, values, flags)} is not supported with --resihp: {self.mend}"

    def said(self, flags: Mapping[str, str]) -> str:
        """The same for a table."""
        return self.mend


@dataclass(frozen=True)
class Needs:
    """Supported together with another argument only.

    Attributes:
        other: which.
        why: a recovery needs it.
    """

    other: str
    why: str

    def refusal(self, name: str, values: Mapping[str, Any], flags: Mapping[str, str]) -> str | None:
        if not values[name] or values[self.other]:
            return None
        return f"{flags[name]} is only supported with {flags[self.other]} with --resihp: {self.why}"

    def said(self, flags: Mapping[str, str]) -> str:
        """The same for a table."""
        return f"with `{flags[self.other]}`: {self.why}"


@dataclass(frozen=True)
class NotWith:
    """Supported as long as another argument is off.

    Attributes:
        other: which.
        why: the two together do harm.
    """

    other: str
    why: str

    def refusal(self, name: str, values: Mapping[str, Any], flags: Mapping[str, str]) -> str | None:
        if not values[name] or not values[self.other]:
            return None
        with_both = f"{flags[name]} with {flags[self.other]} is not supported with --resihp"
        return f"{with_both}: {self.why}; leave one of them out"

    def said(self, flags: Mapping[str, str]) -> str:
        """The same for a table."""
        return f"not with `{flags[self.other]}`: {self.why}"


@dataclass(frozen=True)
class Together:
    """Supported beside some values of other arguments only.

    Attributes:
        accepts: whether all arguments together are such.
        mend: why others are not, and what to do instead, for a message.
    """

    accepts: Callable[[Mapping[str, Any]], bool]
    mend: str

    def refusal(self, name: str, values: Mapping[str, Any], flags: Mapping[str, str]) -> str | None:
        if values[name] is None or self.accepts(values):
            return None
        return f"{_given(name, values, flags)} is not supported with --resihp: {self.mend}"

    def said(self, flags: Mapping[str, str]) -> str:
        """The same for a table."""
        return self.mend


@dataclass(frozen=True)
class Rule:
    """What one argument asks of all arguments together.

    Attributes:
        holds: whether they are so.
        mend: why they have to be, and what to do instead, for a message.
    """

    holds: Callable[[Mapping[str, Any]], bool]
    mend: str


@dataclass(frozen=True)
class Rules:
    """Supported where each of several rules holds; a message names those that don't.

    Attributes:
        rules: these.
    """

    rules: tuple[Rule, ...]

    def refusal(self, name: str, values: Mapping[str, Any], flags: Mapping[str, str]) -> str | None:
        violated = [] if values[name] is None else [each.mend for each in self.rules if not each.holds(values)]
        if not violated:
            return None
        return f"{_given(name, values, flags)} is not supported with --resihp: {'; '.join(violated)}"

    def said(self, flags: Mapping[str, str]) -> str:
        """The same for a table."""
        return "; ".join(each.mend for each in self.rules)


@dataclass(frozen=True)
class Clash:
    """Another argument that does harm beside one.

    Attributes:
        other: which.
        is_there: whether all arguments together have it so.
        why: the two together do harm.
    """

    other: str
    is_there: Callable[[Mapping[str, Any]], Any]
    why: str


@dataclass(frozen=True)
class NotBeside:
    """Supported as long as none of several others does harm.

    Attributes:
        clashes: these.
        counts: whether all arguments together have this one so that they could.
    """

    clashes: tuple[Clash, ...]
    counts: Callable[[Mapping[str, Any]], bool]

    def refusal(self, name: str, values: Mapping[str, Any], flags: Mapping[str, str]) -> str | None:
        found = [each for each in self.clashes if self.counts(values) and each.is_there(values)]
        if not found:
            return None
        said = "; ".join(f"{flags[each.other]}: {each.why}" for each in found)
        return f"{_given(name, values, flags)} is not supported with --resihp beside {said}; leave one of them out"

    def said(self, flags: Mapping[str, str]) -> str:
        """The same for a table."""
        return "above 1, not with some values of " + ", ".join(f"`{flags[each.other]}`" for each in self.clashes)


Condition = Only | Needs | NotWith | Together | NotBeside | Rules


@dataclass(frozen=True)
class Row:
    """One argument.

    Attributes:
        name: the argument's.
        evidence: the kind; None: it is refused.
        shown: the place in Megatron, `module:function`, or the test, `file::function`.
        shown_in_018: the place in Megatron 0.18, if another one shows it there.
        without: it does nothing as long as this other argument is refused, or this value of one (`name=value`).
        unread: nothing of Megatron's training code reads it.
        device: what it needs on which device, if not the same everywhere.
        condition: a supported one's.
        given_up: it asks for an overlap that no job with --resihp has, and why; empty: it is followed.
        needed: why Megatron itself does not train without it, whatever its parser says; empty: it does.
        why: it is refused.
        instead: what to do then.
    """

    name: str
    evidence: Evidence | None = None
    shown: str = ""
    shown_in_018: str = ""
    without: str = ""
    unread: bool = False
    device: str = ""
    condition: Condition | None = None
    given_up: str = ""
    needed: str = ""
    why: str = ""
    instead: str = ""

    @property
    def supported(self) -> bool:
        return self.evidence is not None

    def refusal(self, values: Mapping[str, Any], defaults: Mapping[str, Any], flags: Mapping[str, str]) -> str | None:
        """A line that begins with the flag, if this argument's value is refused."""
        if not self.supported:
            given = values[self.name] != defaults[self.name]
            line = f"{flags[self.name]} is not supported with --resihp: {self.why}; {self.instead}"
            return line if given else None
        return self.condition.refusal(self.name, values, flags) if self.condition else None
