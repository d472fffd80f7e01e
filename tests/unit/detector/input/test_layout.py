# SPDX-License-Identifier: Apache-2.0
"""Who sends to whom under a plan, as the detector sees it."""

from megatron_resihp.detector.input.layout import layout_of
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Schedule
from megatron_resihp.plan.schedule import INTERLEAVED


def links(replica: Replica, interleaved: bool = False) -> list[list[int]]:
    plan = ParallelPlan((replica,), {})
    return layout_of(plan, 0, dict.fromkeys(plan.working, 0), interleaved).links.tolist()


def test_lanes_of_stages_alike() -> None:
    replica = Replica(((0, 1), (2, 3), (4, 5)), (0,))
    assert links(replica) == [[0, 2], [1, 3], [2, 4], [3, 5]]
    assert links(replica, interleaved=True) == [[0, 2], [1, 3], [2, 4], [3, 5], [4, 0], [5, 1]]


def test_each_member_of_the_larger_stage_has_one_peer() -> None:
    chunks = (Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(2, 3, 6))
    assert links(Replica(((0,), (1, 2), (3, 4, 5, 6)), (0,), chunks)) == [
        [0, 1], [0, 2], [1, 3], [1, 4], [2, 5], [2, 6]
    ]  # fmt: skip


def test_stages_with_several_chunks_are_linked_once() -> None:
    in_turns = (Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(0, 3, 4), Chunk(1, 4, 6))
    assert links(Replica(((0, 1), (2,)), (0, 1), in_turns, Schedule(INTERLEAVED))) == [[0, 2], [1, 2]]


def test_replicas_that_share_sequences_count_as_one() -> None:
    """They meet in every layer, so none can be told from the others by its ops."""
    pair = Replica(((0, 1), (2, 3)), (0,)), Replica(((4, 5), (6, 7)), (0,))
    layout = layout_of(ParallelPlan(pair, {}, context_parallel=2), 0, dict.fromkeys(range(8), 0))
    assert layout.replica.tolist() == [0] * 8
    assert layout.tp_rank.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert layout.links.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_groups_of_unlike_sizes_are_not_compared_with_each_other() -> None:
    """An op takes the shorter the more share its sequence."""
    replicas = (Replica(((0,), (1,)), (0,)), Replica(((2,), (3,)), (0,)), Replica(((4,), (5,)), (1,)))
    plan = ParallelPlan(replicas, {}, context_parallel=2, context_groups=(2, 1))
    layout = layout_of(plan, 0, dict.fromkeys(range(6), 0))
    assert layout.replica.tolist() == [0, 0, 0, 0, 1, 1] and layout.tp_rank.tolist() == [0, 0, 1, 1, 0, 0]
    assert layout.stage.tolist() == [0, 1, 0, 1, 2, 3] and not layout.native
    assert layout.links.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_replicas_that_share_experts_count_as_one() -> None:
    replicas = tuple(Replica(((worker,),), (worker,)) for worker in range(4))
    layout = layout_of(ParallelPlan(replicas, {}, expert_parallel=2), 0, dict.fromkeys(range(4), 0))
    assert layout.replica.tolist() == [0, 0, 1, 1] and layout.tp_rank.tolist() == [0, 1, 0, 1]
