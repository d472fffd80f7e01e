# SPDX-License-Identifier: Apache-2.0
"""What is said at the start of single losses that would end the job."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_resihp.control.coordination.exposure import Exposure, exposure, in_words
from megatron_resihp.planner import JobShape
from megatron_resihp.planner.job_shape import sharings

NODE_0 = "node 0 (the coordinator's)"


def said(
    workers: int, tensor: int, pipeline: int, nodes: int, pipeline_last: bool = True, fewest: int = 1, **how: Any
) -> tuple[Exposure, str]:
    shape = JobShape(tensor, pipeline, 96, workers // nodes, **how)
    found = exposure(shape, workers, pipeline_last, fewest)
    return found, in_words(nodes, found, fewest)


def test_stages_of_neighbours_on_one_node_are_lost_with_it() -> None:
    """Two nodes of eight, TP 4 x PP 2: in Megatron's own order each node holds one stage of both replicas."""
    found, line = said(16, 4, 2, 2)
    assert found == Exposure((1,), (), "start it with --resihp-spread-replicas")
    assert line == (
        f"losing {NODE_0} or node 1 ends the job with state that is nowhere else; to avoid that, start it with "
        "--resihp-spread-replicas"
    )
    for mended in ({"spread_replicas": True}, {"pipeline_last": False}):
        found, line = said(16, 4, 2, 2, **mended)
        assert found == Exposure((), ())
        assert line == f"losing {NODE_0} ends the job; any other one may be lost"


def test_copies_of_a_shared_optimizer_may_be_on_the_same_node() -> None:
    """Two replicas on each node, and each part's copy with the neighbour."""
    shared = {"pipeline_last": False, "distributed_optimizer": True}
    found, _ = said(16, 2, 2, 2, **shared)
    assert found.nodes == (1,) and found.mend == "start it with --resihp-spread-replicas"
    assert not said(16, 2, 2, 2, **shared, spread_replicas=True)[0].nodes
    assert not said(16, 2, 2, 2, pipeline_last=False)[0].nodes


def test_three_copies_of_parts_cannot_be_spread_over_two_nodes() -> None:
    """Two of three replicas are neighbours on one of the nodes, wherever they are."""
    found, line = said(6, 1, 2, 2, distributed_optimizer=True, spread_replicas=True)
    assert found.nodes and line.endswith("to avoid that, start it without --use-distributed-optimizer")
    assert said(6, 1, 2, 2, distributed_optimizer=True, pipeline_last=True)[0].mend is not None


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_replica_outlives_no_loss(nodes: int) -> None:
    found, line = said(4, 2, 2, nodes)
    assert found.workers == (0, 1, 2, 3) and found.nodes == tuple(range(1, nodes))
    assert line.endswith("; to avoid that, give it the workers of two replicas, or fewer stages")


def test_experts_that_are_held_once_need_copies() -> None:
    """Eight workers on two nodes share them. Without copies, each has some that are nowhere else."""
    once = {"sharings": sharings((1,), (8, 4, 2, 1))}
    found, line = said(8, 1, 1, 2, **once)
    assert found.workers == tuple(range(8)) and found.nodes == (1,)
    assert line.endswith("with state that is nowhere else; to avoid that, start it with --resihp-expert-copies 1")
    assert said(8, 1, 1, 2, **once, expert_copies=True) == (
        Exposure((), ()), f"losing {NODE_0} ends the job; any other one may be lost",
    )  # fmt: skip
    assert said(8, 1, 1, 1, **once, expert_copies=True)[1] == "any one worker may be lost"


def test_a_job_of_one_node() -> None:
    assert said(8, 2, 2, 1)[1] == "any one worker may be lost"


@pytest.mark.parametrize(("workers", "nodes", "lacks"), [(8, 1, "node"), (4, 2, "replica")])
def test_a_flag_that_can_do_nothing_is_named(workers: int, nodes: int, lacks: str) -> None:
    line = said(workers, 2, 2, nodes, spread_replicas=True)[1]
    assert line.endswith(f"; --resihp-spread-replicas has no second {lacks} to use")


def test_losses_that_leave_too_few_workers() -> None:
    """They end the job, whatever state the others have."""
    few = "ends the job, which then has fewer workers than --min-workers"
    assert said(8, 2, 2, 1, fewest=8)[1] == f"losing any worker {few} 8"
    assert said(16, 4, 2, 2, fewest=16, pipeline_last=False)[1] == f"losing any worker {few} 16"
    assert said(16, 4, 2, 2, fewest=9, pipeline_last=False)[1] == f"losing any node {few} 9"
    assert "--min-workers" not in said(16, 4, 2, 2, fewest=8)[1]


@pytest.mark.parametrize("shared", [False, True])
def test_experts_that_one_worker_has_are_in_copies_of_a_shared_optimizer(shared: bool) -> None:
    """Four replicas, with a quarter of the experts each."""
    shape = JobShape(1, 1, 96, 1, distributed_optimizer=shared, sharings=sharings((1,), (4, 2, 1)))
    found = exposure(shape, 4, True, 1)
    assert found.workers == (() if shared else (0, 1, 2, 3)) and found.nodes == (() if shared else (1, 2, 3))


def test_replicas_that_must_share_in_groups_of_one_size() -> None:
    """Copies of a shared optimizer have all of the state, and half a group can't use it."""
    experts, sequences = sharings((1,), (2,)), sharings((2,), (1,))
    for kind, sharing in (("experts", experts), ("sequences", sequences)):
        shape = JobShape(1, 1, 96, 4, distributed_optimizer=True, sharings=sharing)
        assert in_words(1, exposure(shape, 2, True)) == (
            f"losing any worker ends the job, which then has too few replicas to share {kind} in groups of 2; to avoid "
            f"that, give it more workers, or fewer of them that share {kind}"
        )
        assert in_words(1, exposure(shape, 4, True)) == "any one worker may be lost"


def test_a_coordinator_whose_place_another_may_take() -> None:
    """Two nodes, and the coordinator on neither of them."""
    shape = JobShape(4, 2, 96, 8)
    neighbours = in_words(2, exposure(shape, 16, True, apart=True, replaceable=True))
    may_go = "losing the coordinator ends the job unless another takes its place"
    assert neighbours.startswith(f"{may_go}; losing node 0 or node 1 ends it with state that is nowhere else; to avoid")
    spread = JobShape(4, 2, 96, 8, spread_replicas=True)
    assert in_words(2, exposure(spread, 16, True, apart=True, replaceable=True)) == f"{may_go}; any node may be lost"
    assert in_words(2, exposure(spread, 16, True, apart=True)).startswith(
        "losing the coordinator ends the job; any node"
    )
