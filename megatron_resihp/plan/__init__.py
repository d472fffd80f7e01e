"""Who does what in an epoch. Immutable, validated, JSON in and out. Imports only the standard library."""

from megatron_resihp.plan.microbatches import deal, even_counts
from megatron_resihp.plan.parallel_plan import Coordinate, ParallelPlan, PlanError, Replica

__all__ = ["Coordinate", "ParallelPlan", "PlanError", "Replica", "deal", "even_counts"]
