# SPDX-License-Identifier: Apache-2.0
"""What the coordinator makes of copies of experts that are held once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_membership import Job, events, only

from megatron_resihp.plan import Shard
from megatron_resihp.protocol.published import EmergencyCheckpointOrder, EpochPlan

FIRST, SECOND = (Shard(0, 3, 0, 1, share, 2) for share in range(2))


def pair(min_workers: int = 1, **described: Any) -> Job:
    """Two workers share the experts of a model in one stage."""
    job = Job(2, pipeline=1, per_node=2, min_workers=min_workers)
    described = {"expert_parallel": 2, "experts": 4, "expert_copies": True, **described}
    job.description = replace(job.description, **described)
    return job


def test_a_survivor_has_what_the_dead_one_held() -> None:
    """The plan says whose experts it has a copy of."""
    job = pair().start()
    job.kill(1)
    published = only(EpochPlan, job.report(0))
    assert (published.plan.members, published.plan.expert_parallel) == ((0,), 1)
    assert (published.held, published.copied) == ({0: (FIRST,)}, {0: (SECOND,)})


@pytest.mark.parametrize("ready", [{"keeps_copies": False}, {}], ids=["no room", "none wanted"])
def test_without_copies_the_experts_are_missing(ready: dict[str, bool]) -> None:
    """One worker without room is enough."""
    job = pair()
    job.description = replace(job.description, expert_copies=bool(ready))
    job.describe(0)
    job.ready(0)
    [exposed] = events(job.ready(1, **ready), "exposed")
    assert exposed.workers == (0, 1)
    assert ("--resihp-expert-copies" in exposed.said) is not bool(ready), "that is given where there is no room"
    job.kill(1)
    order = only(EmergencyCheckpointOrder, job.report(0))
    assert order.missing == (SECOND,)


def test_a_survivor_that_is_too_few_saves_all_of_the_state() -> None:
    job = pair(min_workers=2).start()
    job.kill(1)
    order = only(EmergencyCheckpointOrder, job.report(0))
    assert order.missing == () and order.writers == {0: (FIRST,)}


def test_what_a_distributed_optimizer_has_copies_of_is_not_missing() -> None:
    job = pair(min_workers=2, distributed_optimizer=True, expert_copies=False).start()
    job.kill(1)
    assert only(EmergencyCheckpointOrder, job.report(0)).missing == ()
