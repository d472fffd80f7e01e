# SPDX-License-Identifier: Apache-2.0
"""A worker that is started while the others train, anew or for the first time: how it starts without them, and what it
joins them with.

Megatron's start-up is full of collectives that no other worker would take part in. So a joining worker starts in a
world whose groups have no other members (as with Megatron's own --fake-process-group), as what its place was when the
job began, or as some other of the first plan where it was none. Nothing of that is used later: it holds nothing, and
enters an epoch as a survivor that has lost everything does. May import megatron and this package.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_resihp.integration.modes.choice import mode_of
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.plan.slots import renamed
from megatron_resihp.protocol.records import Commit, IterationPhase

TALKS_TO_NOBODY = "fake"


def is_joining() -> bool:
    """Whether this process is none of those that the job began with."""
    return int(os.environ["RESIHP_WORKER"]) != int(os.environ["RANK"])


def build_lonely_world(runtime: Runtime) -> None:
    """Take the part that the worker of this one's RANK has in the first plan, in a world without others."""
    args, worker, part = runtime.job.args, runtime.worker, int(os.environ["RANK"])
    plan = renamed(runtime.control.first_plan(), lambda each: worker if each == part else each)
    runtime.mode = mode_of(runtime, plan, _talk_to_nobody)
    order = runtime.view.rank_order
    args.rank = order.index(worker)
    dist.init_process_group(TALKS_TO_NOBODY, store=FakeStore(), rank=args.rank, world_size=len(order))


def _talk_to_nobody(name: str, workers: Sequence[int]) -> Any:
    """Stands for what makes groups outside torch's world: nothing of the first plan is run here."""


@contextmanager
def lonely_groups() -> Iterator[None]:
    """Let Megatron make all its groups such, also those that it wants of another kind."""
    original = parallel_state.create_group

    def create_group(*positional: Any, backend: Any = None, pg_options: Any = None, **options: Any) -> Any:
        return original(*positional, **options)

    parallel_state.create_group = create_group
    try:
        yield
    finally:
        parallel_state.create_group = original


def stand_at(runtime: Runtime, commit: Commit) -> None:
    """The record of a worker that has nothing to do with iterations up to the commit, and none of their duties."""
    runtime.progress.iteration, runtime.progress.stage = commit.iteration, IterationPhase.STEPPED
    runtime.scheduled.drop_plans_until(commit.iteration)
