"""What a worker knows of a plan in general mode."""

from collections.abc import Sequence

from megatron_resihp.integration.general import General
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
    general = General(ParallelPlan(replicas, {}, (Migration(0, 1, 1), Migration(1, 1, 1))), 0, None)
    assert general.reporter == general.rank_order[-1] == 3 and general.evaluating_replica == 1
