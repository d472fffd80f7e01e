# SPDX-License-Identifier: Apache-2.0
"""That the sequences of test_chaos.py have in them all that may befall a job. Starts no processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from chaos_sequences import LONG_PAUSE_S, MIGRATING, RECOVERY_POINTS, Sequence, random_sequence

from megatron_resihp.config import Injection, Slowdown

SEEDS = 200
OFTEN = 20
"""Of so many sequences, how many have each kind at least."""


def kinds(sequence: Sequence) -> Iterator[str]:
    yield f"{sequence.cast.workers} workers"
    yield f"distributed optimizer: {sequence.distributed_optimizer}"
    for _, plan in sequence.plans:
        yield "a plan with migrations" if plan.migrations else "a plan"
        yield "unlike replicas" if len({replica.stages and replica.shape for replica in plan.replicas}) > 1 else "alike"
    for text in sequence.injections:
        slowdown = Slowdown.parse(text)
        if slowdown is not None:
            yield "slow" if slowdown.workers else "clear"
            continue
        injection = Injection.parse(text)
        where = "recovery" if injection.point in RECOVERY_POINTS else "iteration"
        where = "transfer" if injection.point == MIGRATING else where
        yield f"{injection.action} in a {where}" if injection.action != "stop" else "stop"
        if injection.worker >= sequence.cast.workers:
            yield "who came back is struck"
    for strike in sequence.strikes:
        yield f"{strike.action} from outside, after {strike.after}"
        if strike.pause_s == LONG_PAUSE_S:
            yield "who was given up goes on"
    if sequence.rests:
        yield "the dead come back"


WANTED = {
    "8 workers", "10 workers", "12 workers", "distributed optimizer: True", "distributed optimizer: False",
    "a plan", "a plan with migrations", "unlike replicas", "slow", "clear", "stop", "kill in a iteration",
    "kill in a recovery", "kill in a transfer", "rebuild in a iteration", "rebuild in a recovery",
    "who came back is struck",
    "kill from outside, after iteration", "kill from outside, after epoch_broken",
    "kill from outside, after plan_change", "pause from outside, after iteration",
    "who was given up goes on", "the dead come back",
}  # fmt: skip


def test_each_kind_of_event_is_in_many_sequences() -> None:
    found = Counter(kind for seed in range(SEEDS) for kind in set(kinds(random_sequence(seed))))
    assert {kind: found[kind] for kind in WANTED if found[kind] < OFTEN} == {}


def test_a_seed_is_a_sequence() -> None:
    assert random_sequence(11) == random_sequence(11) != random_sequence(12)
