# SPDX-License-Identifier: Apache-2.0
"""The smallest pieces of a model's state that no plan in force cuts further. Imports only the standard library.

Workers sum gradients, move state and compare digests slice by slice, so that workers with different shards can work
together (DESIGN section 2).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Final, NamedTuple

from megatron_resihp.plan.experts import dealt_experts
from megatron_resihp.plan.parallel_plan import ParallelPlan
from megatron_resihp.plan.replica import Shard, experts_of

WHOLE: Final = -1
"""The cut of a layer's parameters that every tensor-parallel member holds completely."""
TIED: Final = -1
"""The layer number of word embeddings that the head has, too, as its weights or to predict further tokens; they are
with the first layer and with the head."""
NO_EXPERT: Final = -1
"""The share of experts of what is no expert's, and of all of a layer where every shard has all of its experts."""


class Slice(NamedTuple):
    """A piece of a layer.

    Attributes:
        layer: its number, or TIED.
        cut: which of equally many cuts of each of its tensor-parallel parameters, or WHOLE.
        share: which of equally many shares of its experts, or NO_EXPERT.
    """

    layer: int
    cut: int
    share: int = NO_EXPERT

    def __str__(self) -> str:
        return f"{self.layer}/{self.cut}" + ("" if self.share == NO_EXPERT else f":{self.share}")


def cuts_of(shards: Iterable[Shard]) -> int:
    """The number of cuts per layer with which every shard consists of whole cuts."""
    return math.lcm(*(shard.tp_degree for shard in shards))


def shares_of(shards: Iterable[Shard]) -> int:
    """The number of shares of each layer's experts with which every shard has whole shares. Where shards have unequal
    numbers of experts, each expert is a share."""
    return math.lcm(*(_units(shard) for shard in shards))


def shares_of_shard(shard: Shard, shares: int) -> range:
    """The shares of experts that a shard has.

    Raises:
        ValueError: their number is not a multiple of its degree.
    """
    part, units = experts_of(shard), _units(shard)
    each, rest = divmod(shares, units)
    if rest:
        raise ValueError(f"a share of {part.degree} of the experts is not made of whole shares of {shares}")
    own = dealt_experts(units, part.degree)[part.rank]
    return range(own.start * each, own.stop * each)


def _units(shard: Shard) -> int:
    """Of how many equal shares of the experts all shards are made that share them as this one does."""
    return shard.uneven_experts or experts_of(shard).degree


def cuts_of_shard(shard: Shard, cuts: int) -> range:
    """The cuts that a shard consists of.

    Raises:
        ValueError: the number of cuts is not a multiple of its degree.
    """
    return _part(cuts, shard.tp_rank, shard.tp_degree)


def expert_cuts_of_shard(shard: Shard, cuts: int) -> range:
    """The cuts that its experts consist of. Raises ValueError as `cuts_of_shard` does."""
    part = experts_of(shard)
    return _part(cuts, part.cut, part.cuts)


def _part(cuts: int, rank: int, degree: int) -> range:
    each, rest = divmod(cuts, degree)
    if rest:
        raise ValueError(f"a shard of {degree} members is not made of whole cuts of {cuts}")
    return range(rank * each, (rank + 1) * each)


def slices_of(shards: Iterable[Shard], cuts: int, tied_head: int | None, shares: int = 1) -> frozenset[Slice]:
    """The slices that a worker with these shards holds.

    Args:
        shards: of one worker.
        cuts: the result of `cuts_of` for all workers' shards.
        tied_head: number of the head's layer if it has the word embeddings, too.
        shares: the result of `shares_of` for all workers' shards; 1: experts are no slices of their own.
    """
    found = set()
    for shard in shards:
        numbers = cuts_of_shard(shard, cuts)
        for layer in range(shard.first, shard.end):
            tied = tied_head is not None and layer in (0, tied_head)
            found.add(Slice(layer, WHOLE))
            if tied:
                found |= {Slice(TIED, cut) for cut in numbers}
            if not tied or layer:  # the head may have more than the word embeddings
                found |= {Slice(layer, cut) for cut in numbers}
        found |= expert_slices_of([shard], cuts, shares)
    return frozenset(found)


def expert_slices_of(shards: Iterable[Shard], cuts: int, shares: int) -> frozenset[Slice]:
    """Those of them that are slices of experts; arguments as of `slices_of`."""
    found: set[Slice] = set()
    for shard in shards if shares > 1 else ():
        numbers, own = (WHOLE, *expert_cuts_of_shard(shard, cuts)), shares_of_shard(shard, shares)
        found |= {Slice(*place) for place in product(range(shard.first, shard.end), numbers, own)}
    return frozenset(found)


def all_shards(plan: ParallelPlan) -> dict[int, tuple[Shard, ...]]:
    """The shards of each member of a plan with layers."""
    return {worker: plan.shards_of(worker) for worker in plan.members}


def contributors_of(plan: ParallelPlan, cuts: int, tied_head: int | None) -> dict[Slice, tuple[int, ...]]:
    """For each slice, the workers whose gradient of it counts, replica by replica, and within each by stage.

    For parameters that all members of a tensor-parallel group hold completely, only the first member's gradient counts.
    """
    found: dict[Slice, list[int]] = {}
    for worker in plan.working:
        for shard in plan.shards_of(worker):
            for piece in sorted(slices_of([shard], cuts, tied_head)):
                if piece.cut != WHOLE or shard.tp_rank == 0:
                    workers = found.setdefault(piece, [])
                    workers += [worker] if worker not in workers else []
    return {piece: tuple(workers) for piece, workers in found.items()}


class Move(NamedTuple):
    """`source` sends slices to `target`."""

    source: int
    target: int
    slices: tuple[Slice, ...]


def plan_moves(
    holdings: dict[int, frozenset[Slice]], wanted: dict[int, frozenset[Slice]]
) -> tuple[list[Move], frozenset[Slice]]:
    """Which worker sends which slices to which: only missing slices, spread over the holders; the same on every worker.

    Args:
        holdings: for each live worker, the slices that it holds up to date.
        wanted: for each worker, the slices that it needs.

    Returns:
        the moves, in an order in which they can run one after the other, and the slices that no worker holds.
    """
    holders: dict[Slice, list[int]] = {}
    for worker in sorted(holdings):
        for piece in holdings[worker]:
            holders.setdefault(piece, []).append(worker)
    sent = dict.fromkeys(holdings, 0)
    pairs: dict[tuple[int, int], list[Slice]] = {}
    missing = set()
    for target in sorted(wanted):
        for piece in sorted(wanted[target] - holdings.get(target, frozenset())):
            if piece not in holders:
                missing.add(piece)
                continue
            source = min(holders[piece], key=lambda worker: (sent[worker], worker))
            sent[source] += 1
            pairs.setdefault((source, target), []).append(piece)
    return [Move(*pair, tuple(slices)) for pair, slices in sorted(pairs.items())], frozenset(missing)


def in_buckets(holders: dict[Slice, tuple[int, ...]]) -> list[tuple[tuple[int, ...], tuple[Slice, ...]]]:
    """Group slices with the same holders, in an order that is the same on every worker.

    Cuts are grouped layer by layer, from the last layer on: backward passes finish them in this order. What all members
    of a stage hold whole comes after them, as it is summed inside the stage first.
    """
    buckets: dict[tuple[bool, int, tuple[int, ...]], list[Slice]] = {}
    for piece in sorted(holders):
        whole = piece.cut == WHOLE
        buckets.setdefault((whole, 0 if whole else -piece.layer, holders[piece]), []).append(piece)
    return [(workers, tuple(slices)) for (*_, workers), slices in sorted(buckets.items())]


def holders_of(shards: Mapping[int, Sequence[Shard]], cuts: int, tied_head: int | None) -> dict[Slice, tuple[int, ...]]:
    """For each slice, all workers that hold it, sorted."""
    found: dict[Slice, list[int]] = {}
    for worker in sorted(shards):
        for piece in slices_of(shards[worker], cuts, tied_head):
            found.setdefault(piece, []).append(worker)
    return {piece: tuple(workers) for piece, workers in found.items()}
