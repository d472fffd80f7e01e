# SPDX-License-Identifier: Apache-2.0
"""Every course that small jobs can take: the project's state machine, inbox and records, with workers that compute,
reduce, agree, step, die, are late, suspect and join, and with messages that are late or come twice.

What has to hold is in `model_checks`. The mutants show that it can be missed: each breaks a rule of the project's own
code, and the checker has to find a course on which that does harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from model_search import explore, wander
from model_values import Scope, Violation

from megatron_resihp.control.coordination.actions import Action, Phase
from megatron_resihp.control.coordination.inbox import Inbox
from megatron_resihp.control.coordination.record import resolve
from megatron_resihp.control.coordination.state_machine import accounts, epochs, worker_messages
from megatron_resihp.control.head.etcd_log import EtcdLog
from megatron_resihp.control.transport.etcd.gateway import Put
from megatron_resihp.protocol.messages import Ready
from megatron_resihp.protocol.records import IterationPhase, Record

MOST = 1_000_000
DAILY = {
    "a death": Scope(3, deaths=1),
    "a death, and a living worker given up": Scope(2, deaths=1, silences=1),
    "a death, and one that comes back": Scope(2, deaths=1, joins=1),
    "a death, and a message twice": Scope(2, deaths=1, saves=1, resent=1),
    "a death, and a wait that runs out": Scope(3, iterations=1, deaths=1, late=1),
    "two nodes of three are lost": Scope(3, iterations=1, partitions=2),
    "a death, and another coordinator": Scope(2, deaths=1, takeovers=1),
    "a death, and another coordinator beside the first": Scope(2, iterations=1, deaths=1, takeovers=1, deposed=2),
}
NIGHTLY = {
    "two deaths": Scope(3, deaths=2),
    "a death, an error, and one that comes back": Scope(2, deaths=1, errors=1, joins=1),
    "a death, and an interruption before the step": Scope(3, iterations=1, deaths=1, interruptions=1),
    "two nodes of three are lost, and it is known": Scope(3, iterations=1, partitions=2, manager=True),
    "a death, and two nodes of three are lost": Scope(3, iterations=1, deaths=1, partitions=2),
    "a node of two is lost, and an error": Scope(2, partitions=1, errors=1),
    "two nodes of three are lost, and another coordinator comes": Scope(3, iterations=1, partitions=2, takeovers=1),
    "a death, and another coordinator beside the first for longer": Scope(2, deaths=1, takeovers=1, deposed=3),
    "a death, one that comes back, and two coordinators more": Scope(2, deaths=1, joins=1, takeovers=2),
}


@pytest.mark.parametrize("scope", [
    *(pytest.param(scope, id=name) for name, scope in DAILY.items()),
    *(pytest.param(scope, id=name, marks=pytest.mark.nightly) for name, scope in NIGHTLY.items()),
])  # fmt: skip
def test_no_course_of_a_small_job_breaks_the_contract(scope: Scope) -> None:
    found = explore(scope, MOST)
    print(found)
    assert found.whole and found.ends


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_million_states_of_two_replicas_with_two_stages_keep_the_contract(
    record_property: Callable[[str, object], None],
) -> None:
    """The search fails by itself where one of them breaks it."""
    found = explore(Scope(4, pipeline=2, iterations=1, deaths=1, joins=1), MOST)
    print(found)
    record_property("checker_states", found.states)
    assert found.states >= MOST


LARGE = Scope(
    4, pipeline=2, iterations=3, deaths=2, silences=1, errors=1, interruptions=1, late=1, joins=2, resent=1, saves=1
)  # fmt: skip


NODES = Scope(5, iterations=3, deaths=2, silences=1, errors=1, interruptions=1, joins=1, resent=1, partitions=3)
"""Of one worker each."""


@pytest.mark.parametrize(("scope", "courses"), [
    pytest.param(LARGE, 50, id="50"),
    pytest.param(LARGE, 2000, id="2000", marks=pytest.mark.nightly),
    pytest.param(NODES, 500, id="nodes", marks=pytest.mark.nightly),
])  # fmt: skip
def test_no_course_of_a_larger_job_by_chance_breaks_the_contract(scope: Scope, courses: int) -> None:
    assert wander(scope, courses, seed=courses) > courses


# ---- mutants

Patch = pytest.MonkeyPatch
Epochs, WorkerMessages = epochs.Epochs, worker_messages.WorkerMessages


def agreed_does_not_count(patch: Patch) -> None:
    def applied(record: Record) -> int:
        return record.iteration if record.stage is IterationPhase.STEPPED else record.iteration - 1

    patch.setattr(Record, "applied", property(applied))


def go_is_one_short(patch: Patch) -> None:
    def on_ready(self: Any, message: Ready, now: float) -> list[Action]:
        state = self._state
        actions: list[Action] = original(self, message, now)
        if state.phase is Phase.BUILDING and len(set(state.plan.members) - set(state.ready)) == 1:
            return [*actions, *self._epochs.go(state.plan, now)]
        return actions

    original = WorkerMessages._on_ready
    patch.setattr(WorkerMessages, "_on_ready", on_ready)


def deaths_while_building_are_ignored(patch: Patch) -> None:
    def die(self: Any, causes: dict[int, str], died_at: float, now: float) -> list[Action]:
        if self._state.phase is Phase.BUILDING:
            noted: list[Action] = self._note_deaths(causes, died_at, now)
            return noted
        return original(self, causes, died_at, now)

    original = Epochs.die
    patch.setattr(Epochs, "die", die)


def a_message_is_folded_twice(patch: Patch) -> None:
    patch.setattr(Inbox, "_is_new", lambda self, letter: True)


def a_deposed_leaders_write_is_accepted(patch: Patch) -> None:
    def make(self: Any, put: Put, *_: Any) -> int:
        return self._gateway.transact({}, put).revision  # type: ignore[no-any-return]

    patch.setattr(EtcdLog, "_make", make)


def the_slowest_decides(patch: Patch) -> None:
    def mutant(records: Any, *others: Any) -> Any:
        return resolve(sorted(records, key=lambda record: record.applied)[:1], *others)

    patch.setattr(epochs, "resolve", mutant)


def nobody_is_told_of_a_broken_epoch(patch: Patch) -> None:
    patch.setattr(Epochs, "broken", lambda self, cause, probe=False: [])


def whoever_is_left_goes_on(patch: Patch) -> None:
    patch.setattr(accounts, "may_go_on", lambda accounted, members, has_coordinator: True)


def half_of_the_members_are_too_few(patch: Patch) -> None:
    patch.setattr(accounts, "may_go_on", lambda accounted, members, has_coordinator: 2 * accounted > members)


@pytest.mark.parametrize(("mutate", "scope"), [
    (agreed_does_not_count, Scope(2, iterations=1, interruptions=1)),
    (go_is_one_short, Scope(3, iterations=1, deaths=1)),
    (deaths_while_building_are_ignored, Scope(3, iterations=1, deaths=2)),
    (a_message_is_folded_twice, Scope(2, iterations=1, saves=1, resent=1)),
    (a_deposed_leaders_write_is_accepted, Scope(2, iterations=1, deaths=1, takeovers=1, deposed=2)),
    (the_slowest_decides, Scope(2, iterations=1, interruptions=1)),
    (nobody_is_told_of_a_broken_epoch, Scope(3, iterations=1, deaths=1)),
    (whoever_is_left_goes_on, Scope(3, iterations=1, partitions=2)),
    (half_of_the_members_are_too_few, Scope(2, iterations=1, partitions=1)),
])  # fmt: skip
def test_mutants_are_caught(mutate: Callable[[Patch], None], scope: Scope, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    with pytest.raises(Violation) as caught:
        print(explore(scope, MOST))
    print(caught.value)
