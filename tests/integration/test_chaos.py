# SPDX-License-Identifier: Apache-2.0
"""Random sequences of deaths, stops, slowdowns, broken epochs, changes of plan and returns, by seed: training stays the
same, or the job says why it must end.

RESIHP_CHAOS=200 runs that many sequences in place of the samples; RESIHP_CHAOS=17-20 just those. From 1000 on, workers
share experts, sequences or both.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from chaos_checks import check_contract
from chaos_driver import Driver
from chaos_sequences import HEARTBEAT_S, Sequence, random_sequence
from jobs import WISHING, Job, Jobs, ask_at, tiny

SAMPLE = 12
"""A short one."""
SHARING_SAMPLES = (1002, 1064)
"""The same: of a job whose workers share experts and sequences and have the distributed optimizer, and of one that
deals experts in unequal numbers and keeps copies of them."""
BOUND_S = 280.0
"""Far beyond what a sequence takes on a busy machine, and below any time-out of torch."""


def seeds() -> list[Any]:
    text = os.environ.get("RESIHP_CHAOS")
    if text is None:
        return [SAMPLE, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in SHARING_SAMPLES)]
    first, _, last = text.partition("-")
    return list(range(int(first), int(last) + 1) if last else range(int(first)))


@pytest.mark.timeout(2 * BOUND_S)
@pytest.mark.parametrize("seed", seeds())
def test_whatever_happens(jobs: Jobs, tmp_path: Path, seed: int) -> None:
    sequence = random_sequence(seed)
    cast = sequence.cast
    # As few replicas as can be, as the contract is that their number makes no difference.
    reference = jobs.reference(tiny(**cast.arguments()), workers=cast.together)
    job = play(jobs, tmp_path, sequence)
    check_contract(job, reference, cast.tolerance)
    print(f"seed {seed}: {cast.workers} workers, {told(job)}")


def play(jobs: Jobs, path: Path, sequence: Sequence) -> Job:
    """Run a job through a sequence to its end."""
    cast = sequence.cast
    plans = ask_at(path, *((plan, iteration) for iteration, plan in sequence.plans))
    arguments = cast.arguments() | {
        "use_distributed_optimizer": sequence.distributed_optimizer, "resihp_plan": plans or None,
        "resihp_inject": list(sequence.injections) or None,
    }  # fmt: skip
    everybody = range(cast.workers * (sequence.restarts + 1))
    job = jobs.start(
        tiny(**arguments), workers=cast.workers, script=WISHING, heartbeat_timeout_s=HEARTBEAT_S,
        max_restarts=sequence.restarts, wishes=[f"hold-{who}-{when}" for who in everybody for when in sequence.rests],
    )  # fmt: skip
    return job.wait(BOUND_S, Driver(job, sequence).look)


def told(job: Job) -> str:
    """What has befallen a job, and what it has cost, in a line."""
    names = ("worker_dead", "recovery", "reconfiguration", "change_refused")
    counts = ", ".join(f"{name} {len(job.events(name))}" for name in names)
    came_back = len(job.summary.came_back)
    return f"{counts}, came back {came_back}, exit code {job.code}, {job.cpu_s:.1f} CPU s, {job.seconds:.1f} s"
