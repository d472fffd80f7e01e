# SPDX-License-Identifier: Apache-2.0
"""What a failure may not change of a job, and how many replicas may share its sequences and experts. Imports `plan`."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from megatron_resihp.plan import Chunk, Coordinate, Shard, even_counts
from megatron_resihp.plan.microbatches import grouped_counts
from megatron_resihp.plan.replica import shards_at
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.planner.context_groups import fastest_groups


class NoPlanError(Exception):
    """No plan fits the survivors; the message says why, and `missing` lists the shards that no survivor holds."""

    def __init__(self, reason: str, missing: tuple[Coordinate, ...] = ()) -> None:
        super().__init__(reason)
        self.missing = missing


def context_degrees(own: int, tokens: int, members: int) -> tuple[int, ...]:
    """How many replicas may share a sequence, the job's own number first.

    Megatron cuts a sequence in two parts for each of them, so that all have as much to attend to.

    Args:
        own: the job's.
        tokens: of a sequence.
        members: of a stage among which the tokens between layers are shared out, too; 1: they aren't.
    """
    fitting = (degree for degree in range(own - 1, 1, -1) if can_share_sequence(degree, tokens, members))
    return tuple(dict.fromkeys((own, *fitting, 1)))


def can_share_sequence(degree: int, tokens: int, members: int) -> bool:
    """Whether so many replicas may share a sequence; `tokens`, `members`: as of `context_degrees`."""
    return degree == 1 or (tokens % (2 * degree) == 0 and tokens // degree % members == 0)


def expert_degrees(own: int, experts: int) -> tuple[int, ...]:
    """How many replicas may share each layer's experts, the job's own number first: all of them have as many.

    Args:
        own: the job's.
        experts: of a layer; 0: there are none.
    """
    return tuple(degree for degree in range(own, 0, -1) if experts % degree == 0) if experts else (1,)


def uneven_sharings(own: int, experts: int) -> tuple[Sharing, ...]:
    """The numbers of replicas that may share each layer's experts beside `expert_degrees`: some have one expert more
    than others.

    Args:
        own: the job's.
        experts: of a layer.
    """
    return tuple(Sharing(1, degree, 0, experts) for degree in range(own - 1, 1, -1) if experts % degree)


def sharings(
    contexts: Sequence[int], experts: Sequence[int], members: int = 0, alike: bool = False
) -> tuple[Sharing, ...]:
    """How many replicas may share each sequence and each layer's experts, the job's own numbers first.

    Args:
        contexts, experts: what either may be, the job's own first.
        members: see `ParallelPlan.expert_members`.
        alike: the ratio of both stays: Megatron counts ranks through pipelines before it counts them through replicas,
            and wants as many of each in a stage.

    Raises:
        ValueError: of the job's own numbers, neither divides the other.
    """
    own = Fraction(contexts[0], experts[0])
    found = tuple(
        Sharing(context, each, members)
        for context, each in product(contexts, experts)
        if max(context, each) % min(context, each) == 0 and (not alike or Fraction(context, each) == own)
    )
    if found[0][:2] != (contexts[0], experts[0]):
        raise ValueError(
            f"{contexts[0]} replicas share a sequence, and {experts[0]} experts: neither divides the other"
        )
    return found


@dataclass(frozen=True)
class JobShape:
    """What a failure may not change.

    Attributes:
        tensor_parallel, pipeline_parallel: degrees given by the user.
        micro_batches: micro-batches per global batch, over all replicas.
        workers_per_node: worker w lives on node w // workers_per_node.
        micro_batch_group: how many go together in an interleaved pipeline; None: it isn't interleaved.
        distributed_optimizer: replicas share the optimizer's state out.
        spread_replicas: the user wants no shard on one node only.
        sharings: how many replicas may share each sequence and each layer's experts; the job's own numbers first.
        equal_rounds: those that share experts must have equally many micro-batches.
        unlike_context: sequences may be shared in groups of unlike sizes.
        expert_copies: experts that are held once have a copy with another worker, if no optimizer is shared out.
    """

    tensor_parallel: int
    pipeline_parallel: int
    micro_batches: int
    workers_per_node: int = 1
    micro_batch_group: int | None = None
    distributed_optimizer: bool = False
    spread_replicas: bool = False
    sharings: tuple[Sharing, ...] = (Sharing(),)
    equal_rounds: bool = False
    expert_copies: bool = False
    unlike_context: bool = False

    def node_of(self, worker: int) -> int:
        """Where a worker lives."""
        return worker // self.workers_per_node

    @property
    def fewest_micro_batches(self) -> int:
        """Of a replica: Megatron's interleaved schedule needs one for each stage."""
        return 1 if self.micro_batch_group is None else self.pipeline_parallel

    @property
    def own_sharing(self) -> Sharing:
        """Of the job's own layout."""
        return self.sharings[0]

    @property
    def shares_experts(self) -> bool:
        """Whether replicas share experts in the job's own layout."""
        return self.own_sharing.experts > 1

    def sharing(self, replicas: int) -> tuple[Sharing, int]:
        """How many of them share each sequence and each layer's experts, and how many then work: as many as need the
        least time, which is that of the replica with most micro-batches; and of several numbers the largest, since each
        worker then holds the least. Where experts are dealt in unequal numbers, a micro-batch takes as much longer as
        the worker with most of them has more than the mean. Of what takes as long, equal numbers come first.

        Raises:
            NoPlanError: there are too few replicas, or micro-batches don't go evenly into groups of them, which must.
        """
        working = {sharing: self._working(replicas, sharing) for sharing in self.sharings}
        possible = [sharing for sharing, count in working.items() if count]
        if not possible:
            raise NoPlanError(f"{replicas} complete replicas can't share {self.shared}")

        def preference(sharing: Sharing) -> tuple[Fraction, bool, int, int]:
            longest = max(self.shares(working[sharing] // sharing.context, sharing))
            time = longest * sharing.fullest / sharing.context
            return time, sharing.uneven > 0, -sharing.context, -sharing.experts

        chosen = min(possible, key=preference)
        return chosen, working[chosen]

    def context_groups(self, replicas: int) -> tuple[int, ...]:
        """How many of them share each sequence, group by group, as needs the least time; nothing where `sharing` says
        it. A pipeline that is interleaved takes micro-batches in numbers of its own."""
        if not self.unlike_context or self.micro_batch_group is not None:
            return ()
        degrees = [sharing.context for sharing in self.sharings]
        return fastest_groups(replicas, self.micro_batches, self.pipeline_parallel, degrees)

    def _working(self, replicas: int, sharing: Sharing) -> int:
        """How many work: whole groups, of which each member has a micro-batch at least."""
        rounds, rest = divmod(self.micro_batches, sharing.in_step)
        if self.equal_rounds and rest:
            return 0
        return sharing.together * min(replicas // sharing.together, rounds // self.fewest_micro_batches)

    @property
    def shared(self) -> str:
        """What replicas must share, and in groups of how many."""
        degrees = {
            "sequences": sorted({sharing.context for sharing in self.sharings}, reverse=True),
            "experts": sorted({sharing.experts for sharing in self.sharings}, reverse=True),
        }
        shared = {what: " or ".join(map(str, numbers)) for what, numbers in degrees.items() if max(numbers) > 1}
        return " and ".join(f"{what} in groups of {numbers}" for what, numbers in shared.items())

    def shares(self, groups: int, sharing: Sharing) -> tuple[int, ...]:
        """How many micro-batches each group of replicas that share sequences has; without such, each replica."""
        alike, in_step = (sharing.in_step, 1) if self.equal_rounds else (1, sharing.in_step)
        rounds, several = self.micro_batches // alike, groups // alike
        if self.micro_batch_group is None:
            counts = even_counts(rounds, several)
        else:
            counts = grouped_counts(rounds, several, self.pipeline_parallel, self.micro_batch_group, in_step)
        return tuple(count for count in counts for _ in range(alike))

    @property
    def replica_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def coordinates(self) -> list[Coordinate]:
        return [Coordinate(s, t) for s in range(self.pipeline_parallel) for t in range(self.tensor_parallel)]

    def shards_at(self, own: Sequence[Chunk], coordinate: Coordinate) -> tuple[Shard, ...]:
        """What the holder of a coordinate has where no replicas share experts. `own`: the job's own split."""
        return shards_at(own, coordinate, self.tensor_parallel, (0, 1, self.own_sharing.members))
