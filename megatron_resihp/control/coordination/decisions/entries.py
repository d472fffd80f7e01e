# SPDX-License-Identifier: Apache-2.0
"""What the log of decisions holds: how it began, and one step for each input of the state machine.

State is the fold of these. A snapshot may stand for the beginning of a long log. What decides nothing is in none: pages
of Megatron's log, events, and time that nothing waits for. Pure; may import `coding`, `plan`, `protocol`, `events` and
this package's `state_machine`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Annotated, Any, Final, get_args

from megatron_resihp.coding import Form, WrongValueError, decode, encode, omitted_if
from megatron_resihp.control.coordination.actions import Action, Limits, Log, Notify, Reply
from megatron_resihp.control.coordination.decisions.plain_state import state_from
from megatron_resihp.control.coordination.state_machine.membership import Input
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.events.codec import UnusableEventError, plain, read_event
from megatron_resihp.events.event import Event
from megatron_resihp.events.nonfinite import jsonable
from megatron_resihp.plan import Coordinate, ParallelPlan
from megatron_resihp.protocol.logs import LogsWanted, Place
from megatron_resihp.protocol.notices import Notice
from megatron_resihp.protocol.published import EmergencyCheckpointOrder, EpochPlan, Go
from megatron_resihp.protocol.version import VERSION
from megatron_resihp.protocol.wire import COORDINATOR, Kinds


@dataclass(frozen=True)
class Passed:
    """Time in which all messages have been handled, while something waits for it."""

    seconds: float


@dataclass(frozen=True)
class CoordinatorFailed:
    """The coordinator has failed, so that survivors save and the job ends; as of `Membership.save_and_end`."""

    reason: str
    unpublished: bool


@dataclass(frozen=True)
class TakenOver:
    """Another coordinator goes on in the place of one that was lost; as of `Membership.take_over`."""

    by: str


Fed = Input | Passed | CoordinatorFailed | TakenOver
"""What the state machine is fed."""


def _plain_event(event: Event) -> Any:
    return jsonable(plain(event))


def _read_event(value: Any) -> Event:
    try:
        return read_event(value if isinstance(value, Mapping) else {})
    except UnusableEventError as error:
        raise WrongValueError(f"is not an event: {error}") from None


def _one_of(*classes: type) -> Form:
    """One of several dataclasses, with its name."""
    named = {each.__name__: each for each in classes}

    def to_plain(value: Any) -> dict[str, Any]:
        return {"kind": type(value).__name__, "body": encode(value)}

    def from_plain(value: Any) -> Any:
        kind = value.get("kind") if isinstance(value, dict) else None
        if kind not in named:
            raise WrongValueError(f"is none of {', '.join(named)}")
        return decode(named[kind], value.get("body"))

    return Form(to_plain, from_plain)


@dataclass(frozen=True)
class Found:
    """The planner has made a plan. `told`: what the event log says of it."""

    plan: ParallelPlan
    told: tuple[Annotated[Event, Form(_plain_event, _read_event)], ...]


@dataclass(frozen=True)
class NotFound:
    """The planner has made none. `missing`: what no survivor holds."""

    reason: str
    missing: tuple[Coordinate, ...]


PlannerSaid = Found | NotFound


@dataclass(frozen=True)
class Began:
    """A job has begun.

    Attributes:
        version: of this package.
        run: a token that this run alone has; see `keys.RUN`.
    """

    version: str
    size: JobSize
    limits: Limits
    run: str = omitted_if("")


@dataclass(frozen=True)
class Step:
    """The state machine was fed something.

    Attributes:
        number: from 1, of this run's steps.
        now: Unix time.
        fed: what.
        letter: the id of the letter that brought it, by which a later coordinator knows the letter if it comes again.
        reached: the last iteration that had been finished before, if that was not said yet.
        page: up to which page Megatron's log had come before, likewise.
        answers: of the planner, in the order in which it was asked.
        actions: what came out, by names.
        digest: of all that came out; empty: nothing has.
        error: what was raised instead.
    """

    number: int
    now: float
    fed: Annotated[Fed, _one_of(*get_args(Input), Passed, CoordinatorFailed, TakenOver)]
    letter: str | None = omitted_if(None)
    reached: int | None = omitted_if(None)
    page: Place | None = omitted_if(None)
    answers: tuple[Annotated[PlannerSaid, _one_of(Found, NotFound)], ...] = omitted_if(())
    actions: tuple[str, ...] = omitted_if(())
    digest: str = omitted_if("")
    error: str | None = omitted_if(None)


Published = Notify | EpochPlan | EmergencyCheckpointOrder | Go | LogsWanted
"""What is carried out again: it leads to the same keys in a store, and the same logs, as it did before."""
PUBLISHED: Final = get_args(Published)
_BODIES: Final = _one_of(*get_args(Notice), *(each for each in PUBLISHED if each is not Notify))


def _plain_published(action: Published) -> Any:
    return _BODIES.to_plain(action.notice if isinstance(action, Notify) else action)


def _read_published(value: Any) -> Published:
    body = _BODIES.from_plain(value)
    return body if isinstance(body, PUBLISHED) else Notify(body)


def _checked_state(value: Any) -> Any:
    state_from(value)
    return value


@dataclass(frozen=True)
class Snapshot:
    """What all steps of a run so far have led to: it stands for them, and for how the run began.

    Attributes:
        number: of the last of these steps.
        now: Unix time of that one.
        state: as of `plain_state`.
        began_at, published, facts, last, letters, from_agents: as of `Handover`.
    """

    began: Began
    number: int
    now: float
    state: Annotated[dict[str, Any], Form(lambda state: state, _checked_state)]
    began_at: float | None
    published: tuple[Annotated[Published, Form(_plain_published, _read_published)], ...]
    facts: tuple[Annotated[Event, Form(_plain_event, _read_event)], ...]
    last: tuple[Annotated[Event, Form(_plain_event, _read_event)], ...]
    letters: tuple[tuple[str, ...], ...]
    from_agents: tuple[str, ...]


Start = Began | Snapshot
"""What a log may start with."""
Entry = Start | Step
LARGEST: Final = 1 << 28
"""Characters of an entry. A snapshot of 10,000 workers has 25 million."""
ENTRIES: Final = Kinds[Entry](get_args(Entry), "a decision", LARGEST)


def began_of(start: Start) -> Began:
    """How a run began whose log starts so."""
    return start.began if isinstance(start, Snapshot) else start


def line_of(entry: Entry) -> str:
    """The text of an entry, in one line."""
    return ENTRIES.write(entry, COORDINATOR)


def line_of_step(step: Step, said: str) -> str:
    """As `line_of`.

    Args:
        said: the text of the body of the message that the state machine was fed, see `wire.Letter`; empty: there is
            none. It is not written anew: most steps are messages that decide nothing by themselves.
    """
    decided = step.actions or step.answers or step.error is not None
    if not said or decided or step.reached is not None or step.page is not None or step.letter is None:
        return line_of(step)
    letter = encode_basestring_ascii(step.letter)
    fed = f'{{"kind": "{type(step.fed).__name__}", "body": {said}}}'
    return f'{_STEP}{{"number": {step.number}, "now": {step.now!r}, "fed": {fed}, "letter": {letter}}}}}'


_STEP: Final = f'{{"protocol": "{VERSION}", "kind": "{Step.__name__}", "sender": "{COORDINATOR}", "id": null, "body": '


def names_of(actions: Iterable[Action]) -> tuple[str, ...]:
    """Actions in a word each."""
    return tuple(_name(action) for action in actions)


def digest_of(actions: Iterable[Action]) -> str:
    """Of equal actions it is equal; of none it is empty."""
    written = [[_name(action), _plain(action)] for action in actions]
    return hashlib.sha256(json.dumps(written).encode()).hexdigest()[:16] if written else ""


def _name(action: Action) -> str:
    match action:
        case Log(event):
            return event.name
        case Notify(notice):
            return type(notice).__name__
        case Reply(_, answer):
            return type(answer).__name__
        case _:
            return type(action).__name__


def _plain(action: Action) -> Any:
    match action:
        case Log(event):
            return plain(event)
        case Notify(notice):
            return encode(notice)
        case Reply(key, answer):
            return [key, encode(answer)]
        case _:
            return encode(action)
