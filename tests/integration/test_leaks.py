# SPDX-License-Identifier: Apache-2.0
"""Fifty reconfigurations in one job leave nothing behind.

Groups, threads, descriptors, memory and node 0's keys stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Jobs, ask_at, check_training, tiny
from test_plans import chunks, stages

from megatron_resihp.control.commands.contact import reach
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.wire import Op
from megatron_resihp.plan import ParallelPlan, Replica

RECOVERIES = 50
FIRST = 2
"""Iteration of the first recovery."""
POINTS = ("forward", "backward", "p2p", "grad-sync", "norm")
"""Where it strikes, in turn: gloo loses other operations where peers are connected than where they are not yet. All lie
before the agreement, which nobody passes alone; after it the next fault injection might strike in the same epoch."""
SETTLED = 10
"""Recoveries after which caches are warm; later ones may not add anything."""
MEMORY_TOLERANCE = 1.05


def final_state(job: Job) -> dict[int, str]:
    """The digest of parameters and moments that each worker ended with."""
    return {event["worker"]: event["digests"] for event in job.events("digest")}


@pytest.mark.nightly
def test_fifty_recoveries_leave_nothing_behind(jobs: Jobs) -> None:
    """Groups are rebuilt without a loss: one worker after another is made to report a communication error."""
    iterations = FIRST + RECOVERIES + 1
    arguments = tiny(train_iters=iterations, pipeline_model_parallel_size=2)
    injections = [f"rebuild:{step % 4}@{FIRST + step}:{POINTS[step % len(POINTS)]}" for step in range(RECOVERIES)]
    reference = jobs.reference(arguments, workers=4)
    job = jobs.start([*arguments, "--resihp-inject", *injections], workers=4)
    keys = KeyCounts(job)
    job.wait(180.0, meanwhile=keys.look)

    assert len(job.events("recovery")) == RECOVERIES
    half = RECOVERIES // 2  # a key for each recovery would be a leak; looks at other moments find some more or less
    assert keys.most_after(half) < keys.most_before(half) + half // 2, keys.most
    check_training(job, reference)
    # The layout is the reference's throughout, so not one bit of the state may differ.
    assert final_state(job) == final_state(reference)
    for worker in range(4):
        check_flat(resources(job, worker))


class KeyCounts:
    """How many keys node 0's store has, at most, after how many recoveries."""

    def __init__(self, job: Job) -> None:
        self.most: dict[int, int] = {}
        self._job = job
        self._store: Any = None

    def look(self) -> None:
        with suppress(StoreError):  # before its start, and at its end
            self._store = self._store or reach(self._job.run_dir)
            recoveries, keys = len(self._job.events("recovery")), int(self._store.connection.ask(Op.COUNT).value)
            self.most[recoveries] = max(keys, self.most.get(recoveries, 0))

    def most_before(self, recoveries: int) -> int:
        return max(keys for number, keys in self.most.items() if number < recoveries)

    def most_after(self, recoveries: int) -> int:
        return max(keys for number, keys in self.most.items() if number >= recoveries)


CHANGES = 50
PIPELINE: dict[str, Any] = {"num_layers": 4, "pipeline_model_parallel_size": 2, "train_iters": 2 * CHANGES + 2}
OWN = ParallelPlan((Replica(stages([0], [2]), (0, 2)), Replica(stages([1], [3]), (1, 3))), {})
"""As the job starts."""
UNLIKE = ParallelPlan((Replica(stages([0, 1], [2]), (0, 1), chunks(3, 6)), Replica(stages([3]), (2, 3), chunks(6))), {})


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shared_out", [False, True], ids=["", "distributed optimizer"])
def test_fifty_changes_there_and_back_leave_nothing_behind(jobs: Jobs, tmp_path: Path, shared_out: bool) -> None:
    """By choice, to replicas that are unlike each other and to the job's own again."""
    model = PIPELINE | {"use_distributed_optimizer": shared_out}
    plans = ask_at(tmp_path, *(((UNLIKE, OWN)[number % 2], 2 + 2 * number) for number in range(CHANGES)))
    job = jobs.start(tiny(**model, resihp_plan=plans), workers=4).wait(240.0)

    assert len(job.events("reconfiguration")) == CHANGES, job.tails()
    check_training(job, jobs.reference(tiny(**model), workers=4))
    for worker in range(4):
        seen = resources(job, worker)
        assert len(seen) == CHANGES
        # Each layout has its own number of groups.
        check_flat(seen[::2], CHANGES // 5)
        check_flat(seen[1::2], CHANGES // 5)


def resources(job: Job, worker: int) -> list[dict[str, Any]]:
    """What a worker had of each after each reconfiguration."""
    return [event for event in job.events("resources") if event["worker"] == worker]


def check_flat(seen: Sequence[dict[str, Any]], settled: int = SETTLED) -> None:
    """There is no more of anything at the end than at the beginning."""
    worker = seen[0]["worker"]
    # Without a death no operation may get lost: it would keep its group and a thread until the group's time-out.
    assert min(event["left_behind"] for event in seen[-settled:]) == 0
    for name in ("groups", "threads", "descriptors"):
        counts = [event[name] for event in seen]
        # Some are seen while they end; what stays would raise the lowest count.
        assert min(counts[-settled:]) <= min(counts[:settled]), f"{name} of worker {worker}: {counts}"
    memory = [round(event["resident_bytes"] / 2**20) for event in seen]
    assert memory[-1] <= MEMORY_TOLERANCE * memory[settled], f"MiB of worker {worker}: {memory}"
