"""What a job's planner makes of a strategy's plan before it is proposed."""

from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Schedule, shortened
from megatron_resihp.planner.bridge import plainly_ordered

ZERO_BUBBLE = Schedule("zero-bubble-h1")


def test_one_stage_needs_no_special_order() -> None:
    whole, halves = (Chunk(0, 0, 6),), (Chunk(0, 0, 3), Chunk(1, 3, 6))
    alone = [Replica(((worker,),), (worker,), whole, ZERO_BUBBLE) for worker in range(2)]
    assert shortened(plainly_ordered(ParallelPlan(tuple(alone))), whole).not_rectangular is None
    pipeline = Replica(((1,), (2,)), (1,), halves, ZERO_BUBBLE)
    plan = plainly_ordered(ParallelPlan((alone[0], pipeline)))
    assert [replica.schedule for replica in plan.replicas] == [None, ZERO_BUBBLE]
