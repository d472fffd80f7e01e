# SPDX-License-Identifier: Apache-2.0
"""What a worker knows of a heterogeneous plan."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.integration.ops.program_schedule import boundary_of
from megatron_resihp.integration.world.heterogeneous import HeterogeneousView
from megatron_resihp.integration.world.heterogeneous_groups import Sizes, layout_of_chunks
from megatron_resihp.plan import Chunk, Migration, ParallelPlan, PlannedOp, Replica, Schedule
from megatron_resihp.plan.schedule import EXPLICIT

HALVES = (Chunk(0, 0, 3), Chunk(1, 3, 6))


def in_order(*micro_batches: Sequence[int]) -> Schedule:
    """For each stage all forwards, then all backwards."""
    forwards = [tuple(PlannedOp("F", stage, m) for m in own) for stage, own in enumerate(micro_batches)]
    orders = tuple((*own, *(op._replace(kind="B") for op in own)) for own in forwards)
    return Schedule(EXPLICIT, orders=orders)


def test_who_has_no_losses_does_not_report() -> None:
    """All that the first replica's head would do is done by the second one's."""
    replicas = (
        Replica(((0,), (1,)), (0, 1), HALVES, in_order((0, 1), ())),
        Replica(((2,), (3,)), (2, 3), HALVES, in_order((2, 3), (0, 1, 2, 3))),
    )
    view = HeterogeneousView(ParallelPlan(replicas, {}, (Migration(0, 1, 1), Migration(1, 1, 1))), 0, None)
    assert not view.reports and view.rank_order[-1] == 3
    assert [replica.stages for replica in view.evaluation(4)] == [((2,), (3,))]


def test_who_helps_in_training_helps_to_evaluate() -> None:
    """No replica has members in every stage; the reporter's, the second one, lacks the first stage."""
    replicas = (
        Replica(((0,), ()), (0, 1), HALVES, in_order((0, 1, 2, 3), ())),
        Replica(((), (3,)), (2, 3), HALVES, in_order((), (2, 3, 0, 1))),
    )
    migrations = (*(Migration(m, 1, 1) for m in (0, 1)), *(Migration(m, 0, 0) for m in (2, 3)))
    views = [HeterogeneousView(ParallelPlan(replicas, {2: None}, migrations), worker, None) for worker in (0, 2, 3)]
    assert [tuple(view.evaluation_order(3)) for view in views] == [(0, 1, 2), (), (0, 1, 2)]
    for view in views:
        assert view.reports == (view.worker == 3)
        [evaluating] = view.evaluation(3)
        assert evaluating.stages == ((0,), (3,)) and evaluating.chunks == HALVES


def test_a_helper_of_two_chunks_evaluates_both() -> None:
    """As one stage, whatever its number is in its own replica."""
    chunks = (Chunk(0, 0, 2), Chunk(1, 2, 4), Chunk(0, 4, 5), Chunk(1, 5, 6))
    swapped = tuple(chunk._replace(stage=1 - chunk.stage) for chunk in chunks)

    def order(*own_chunks: int) -> tuple[PlannedOp, ...]:
        forwards = [PlannedOp("F", chunk, m) for chunk in own_chunks for m in (0, 1)]
        return (*forwards, *(op._replace(kind="B") for op in reversed(forwards)))

    replicas = (
        Replica(((), (1,)), (0,), chunks, Schedule(EXPLICIT, orders=((), order(1, 3)))),
        Replica(((), (5, 4)), (1,), swapped, Schedule(EXPLICIT, orders=((), order(0, 2)))),
    )
    migrations = (Migration(0, 0, 1), Migration(0, 2, 1), Migration(1, 1, 0), Migration(1, 3, 0))
    view = HeterogeneousView(ParallelPlan(replicas, {}, migrations), 4, None)
    [evaluating] = view.evaluation(2)
    assert view.rank_order[-1] == 1 and tuple(view.evaluation_order(2)) == (0, 1)
    assert evaluating.stages == ((5, 4), (1,)) and evaluating.chunks == chunks


@pytest.mark.parametrize(
    ("count", "shares"),
    [(8, [(0, 1), (2, 3, 4, 5, 6, 7)]), (4, [(0,), (1, 2, 3)]), (2, [(0,), (1,)]), (1, [(0,), ()])],
)
def test_replicas_evaluate_as_much_as_their_speed_asks_for(count: int, shares: list[tuple[int, ...]]) -> None:
    """The first one, which reports, always has some; whose micro-batches they were in training doesn't matter."""
    slow, fast = Replica(((0,), (1,)), (3,), HALVES), Replica(((2, 3),), (0, 1, 2), (Chunk(0, 0, 6),))
    views = [HeterogeneousView(ParallelPlan((slow, fast), {}), worker, None) for worker in (1, 3)]
    assert [tuple(view.evaluation_order(count)) for view in views] == shares
    heads = (1, 2, 3) if shares[1] else (1,)
    assert views[0].evaluating_heads(count) == heads and views[0].reports


@pytest.mark.parametrize(("packed", "expected"), [(False, (32, (2, 8))), (True, (64, (1, 8)))])
def test_packed_samples_cross_as_one(packed: bool, expected: tuple[int, tuple[int, int]]) -> None:
    args: Any = SimpleNamespace(seq_length=32, hidden_size=8, dataloader_inter_document_masking=packed)
    assert boundary_of(args, 2) == expected


def test_gradients_are_summed_at_the_end_and_in_megatrons_own_groups_overlap_again() -> None:
    """Megatron's builder writes the size of buckets, too."""
    layers = (Chunk(0, 0, 6),)
    own = {
        "overlap_grad_reduce": True, "bucket_size": 7, "use_distributed_optimizer": True,
        "defer_embedding_wgrad_compute": True,
    }  # fmt: skip
    wrapping = SimpleNamespace(**own)
    derived: Any = SimpleNamespace(of_degree=lambda degree: {})
    sizes = Sizes(64, derived, wrapping)
    sizes.replace(HeterogeneousView(ParallelPlan((Replica(((0,),), (0,), layers),)), 0, None))
    assert not wrapping.overlap_grad_reduce and not wrapping.use_distributed_optimizer
    assert not wrapping.defer_embedding_wgrad_compute
    wrapping.bucket_size = None
    sizes.restore()
    assert vars(wrapping) == own


@pytest.mark.parametrize("chunks", [(Chunk(0, 0, 6),), (Chunk(0, 0, 2), Chunk(1, 2, 5), Chunk(0, 5, 6))])
def test_megatron_takes_a_layout_of_chunks_whose_head_predicts_further_tokens(chunks: tuple[Chunk, ...]) -> None:
    layout = layout_of_chunks(chunks, 6, 2)
    assert not layout.validate_layer_layout(num_layers=4, mtp_num_layers=2), "a stage of their own"
    assert [layer.name for layer in layout.layout[-1][0]][-3:] == ["mtp", "mtp", "loss"]
