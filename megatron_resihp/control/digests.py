"""Digests of the state that workers hold, compared under equal keys. Pure; imports `plan`.

Under a plan of equal replicas a key is "stage/TP rank", under any other "layer/cut": which of as many equal cuts of a
layer as the least common multiple of all tensor-parallel degrees in force; cut −1 are the parameters that every member
of a group holds whole, layer −1 are word embeddings that the head shares.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from megatron_resihp.plan import Chunk, Coordinate, ParallelPlan, Shard
from megatron_resihp.plan.replica import shards_at


def differing(reports: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """The keys under which workers report unlike digests."""
    found: dict[str, set[str]] = defaultdict(set)
    for report in reports:
        for key, digest in report.items():
            found[key].add(digest)
    return tuple(sorted((key for key, digests in found.items() if len(digests) > 1), key=_numbers))


def name_of(key: str, plan: ParallelPlan) -> str:
    """A key in words."""
    first, second = _numbers(key)
    if plan.not_rectangular is None:
        return f"stage {first} TP rank {second}"
    layer = "the word embeddings" if first < 0 else f"layer {first}"
    return layer if second < 0 else f"{layer}, cut {second} of {_cuts(plan)}"


def shards_of_key(key: str, plan: ParallelPlan, own: Sequence[Chunk]) -> tuple[Shard, ...]:
    """What a key is a digest of, as shards of the model."""
    first, second = _numbers(key)
    if plan.not_rectangular is None:
        return shards_at(own, Coordinate(first, second), plan.tensor_parallel)
    layer = max(first, 0)
    return (Shard(layer, layer + 1, 0, 1) if second < 0 else Shard(layer, layer + 1, second, _cuts(plan)),)


def _cuts(plan: ParallelPlan) -> int:
    return math.lcm(*(shard.tp_degree for worker in plan.members for shard in plan.shards_of(worker)))


def _numbers(key: str) -> tuple[int, int]:
    first, second = key.split("/")
    return int(first), int(second)
