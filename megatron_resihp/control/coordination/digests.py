# SPDX-License-Identifier: Apache-2.0
"""Digests of the state that workers hold; digests with equal keys are compared. Pure; imports `plan`.

For shards of the job's own layout a key is "stage/TP rank", and of a distributed optimizer's parts
"stage/TP rank/part/parts"; for others "layer/cut/cuts": which of so many equal cuts of a layer. Cut −1 are the
parameters that every member of a group holds whole, cut −2 is what a layer's modules keep besides (EXTRA), layer −1 are
word embeddings that the head shares. Experts that replicas share have "layer/cut/cuts/share/shares".
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from megatron_resihp.plan import Chunk, Coordinate, Shard
from megatron_resihp.plan.replica import shards_at

EXTRA: Final = -2
"""The cut of a layer's extra state."""


def differing(reports: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """The keys under which workers report unlike digests."""
    found: dict[str, set[str]] = defaultdict(set)
    for report in reports:
        for key, digest in report.items():
            found[key].add(digest)
    return tuple(sorted((key for key, digests in found.items() if len(digests) > 1), key=_numbers))


def name_of(key: str) -> str:
    """A key in words."""
    numbers = _numbers(key)
    if len(numbers) == 2:
        return "stage {} TP rank {}".format(*numbers)
    if len(numbers) == 4:
        return "stage {} TP rank {}, part {} of {} of the optimizer".format(*numbers)
    layer, cut, cuts, *experts = numbers
    name = "the word embeddings" if layer < 0 else f"layer {layer}"
    if cut == EXTRA:
        return f"{name}'s extra state"
    cut_said = name if cut < 0 else f"{name}, cut {cut} of {cuts}"
    return "{}, share {} of {} of the experts".format(cut_said, *experts) if experts else cut_said


def shards_of_key(key: str, own: Sequence[Chunk], degree: int) -> tuple[Shard, ...]:
    """What a key is a digest of, as shards of the model. `own`, `degree`: the job's own layout."""
    numbers = _numbers(key)
    if len(numbers) in (2, 4):
        return shards_at(own, Coordinate(*numbers[:2]), degree)
    layer, cut, cuts, *experts = max(numbers[0], 0), *numbers[1:]
    members = (0, 1) if cut < 0 else (cut, cuts)
    return (Shard(layer, layer + 1, *members, *experts),)


def _numbers(key: str) -> tuple[int, ...]:
    return tuple(map(int, key.split("/")))
