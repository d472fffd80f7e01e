# SPDX-License-Identifier: Apache-2.0
"""That the sequences of test_chaos.py have in them all that may befall a job. Starts no processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from chaos_casts import MIGRATING
from chaos_checks import must_end
from chaos_sequences import FIRST_SHARING, LONG_PAUSE_S, RECOVERY_POINTS, Sequence, random_sequence

from megatron_resihp.config import Injection, Slowdown
from megatron_resihp.plan import ParallelPlan, Replica

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
ALONE = {"10 workers", "12 workers", "a plan with migrations"}
"""Of jobs whose workers share nothing."""


SHARING: dict[str, Callable[[Sequence], bool]] = {
    "experts": lambda sequence: sequence.cast.sharing.experts > 1,
    "experts by four workers": lambda sequence: sequence.cast.model.get("expert_model_parallel_size") == 4,
    "experts that live once": lambda sequence: sequence.cast.sharing.experts == 4,
    "experts that live twice": lambda sequence: sequence.cast.sharing.experts == 2,
    "cut experts": lambda sequence: sequence.cast.model.get("expert_tensor_parallel_size") == 2,
    "experts of the members of a stage": lambda sequence: sequence.cast.sharing.members == 1,
    "sequences": lambda sequence: sequence.cast.sharing.context > 1,
    "both": lambda sequence: min(sequence.cast.sharing[:2]) > 1,
    "both, in a pipeline": lambda sequence: min(*sequence.cast.sharing[:2], sequence.cast.pipeline) > 1,
    "in 16 bits": lambda sequence: bool(sequence.cast.model.get("bf16")),
    "of a smaller degree": lambda sequence: any(
        (plan.context_parallel, plan.expert_parallel) != sequence.cast.sharing[:2] and plan.not_uniform is None
        for _, plan in sequence.plans
    ),
    "sequences in groups of unlike sizes": lambda sequence: any(plan.context_groups for _, plan in sequence.plans),
    "unequal numbers of experts": lambda sequence: any(plan.uneven_experts for _, plan in sequence.plans),
    "uneven": lambda sequence: any(
        plan.not_uniform is None and len({len(replica.micro_batches) for replica in plan.replicas}) > 1
        for _, plan in sequence.plans
    ),
    "refused": lambda sequence: any(plan.not_uniform for _, plan in sequence.plans),
}
"""What workers share, and the plans that are asked for."""


@pytest.mark.parametrize("first", [0, FIRST_SHARING], ids=["alone", "sharing"])
def test_each_kind_of_event_is_in_many_sequences(first: int) -> None:
    found = Counter(kind for seed in range(first, first + SEEDS) for kind in set(kinds(random_sequence(seed))))
    wanted = WANTED if first == 0 else WANTED - ALONE
    assert {kind: found[kind] for kind in wanted if found[kind] < OFTEN} == {}


def test_each_way_to_share_is_in_many_sequences() -> None:
    sequences = [random_sequence(seed) for seed in range(FIRST_SHARING, FIRST_SHARING + SEEDS)]
    found = {name: sum(map(test, sequences)) for name, test in SHARING.items()}
    assert {name: count for name, count in found.items() if count < OFTEN} == {}
    for name, test in SHARING.items():
        shared_out = {sequence.distributed_optimizer for sequence in sequences if test(sequence)}
        assert shared_out == {False, True}, name


class Ended:
    """A job of four workers with an expert each, which some of them have outlived."""

    def __init__(self, *dead: int, optimizer: bool = False) -> None:
        replicas = tuple(Replica(((worker,),), (worker,)) for worker in range(4))
        plan = ParallelPlan(replicas, expert_parallel=4).to_dict()
        told = {"chunks": [[0, 0, 4]], "expert_parallel": 4, "context_parallel": 1, "tensor_parallel": 1,
                "pipeline_parallel": 1, "distributed_optimizer": optimizer}  # fmt: skip
        self._events = {"job": [told], "epoch_started": [{"plan": plan}],
                        "worker_dead": [{"dead": worker} for worker in dead]}  # fmt: skip

    def events(self, name: str) -> list[dict[str, Any]]:
        return self._events[name]


@pytest.mark.parametrize("optimizer", [False, True])
def test_a_job_goes_on_as_long_as_each_expert_or_its_copy_is_there(optimizer: bool) -> None:
    """Copies go around as 0, 2, 1, 3."""
    for dead, ends in (((), False), ((1,), False), ((0, 1), False), ((1, 3), True), ((0, 1, 2), True)):
        assert must_end(cast(Any, Ended(*dead, optimizer=optimizer))) == ends, dead


def test_a_seed_is_a_sequence() -> None:
    assert random_sequence(11) == random_sequence(11) != random_sequence(12)
