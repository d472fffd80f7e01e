# SPDX-License-Identifier: Apache-2.0
"""The types that fields of messages are made of: types with their rules.

May import `coding` and `plan`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

from megatron_resihp.coding import Between, Holds, Matches
from megatron_resihp.plan import Chunk, Shard
from megatron_resihp.plan.rules import Sharing

MOST_LAYERS: Final = 10_000
MOST_SHARES: Final = 4096
MOST_MICRO_BATCHES: Final = 1_000_000
LONGEST_ID: Final = 200


def _is_shard(shard: Shard) -> bool:
    bounded = min(shard) >= 0 and max(shard) <= MOST_LAYERS
    cut = shard.tp_rank < shard.tp_degree <= MOST_SHARES and shard.expert_rank < shard.expert_degree <= MOST_SHARES
    in_groups = not shard.expert_members or shard.tp_degree % shard.expert_members == 0
    dealt = not shard.uneven_experts or shard.expert_degree <= shard.uneven_experts
    return bounded and shard.first <= shard.end and cut and in_groups and dealt


def _is_chunk(chunk: Chunk) -> bool:
    return all(0 <= number <= MOST_LAYERS for number in chunk)


def _is_sharing(sharing: Sharing) -> bool:
    return min(sharing[:2]) >= 1 and sharing.members >= 0 and max(sharing) <= MOST_SHARES


Natural = Annotated[int, Between(0)]
Positive = Annotated[int, Between(1)]
Signal = Annotated[int, Between(1, 64)]
ExitCode = Annotated[int, Between(0, 255)]
Port = Annotated[int, Between(1, 65535)]
Degree = Annotated[int, Between(1, MOST_SHARES)]

Finite = Annotated[float, Holds(math.isfinite, "a finite number")]
UnixTime = Finite
Seconds = Finite

Worker = Natural
"""The id of a worker; whether the job has one is for the code that knows the job."""
Node = Natural
Epoch = Natural

HeldShard = Annotated[Shard, Holds(_is_shard, "a shard: layers first to end, ranks below their degrees")]
HeldShards = tuple[HeldShard, ...]
LayerChunk = Annotated[Chunk, Holds(_is_chunk, f"a chunk: stage, first and end, up to {MOST_LAYERS}")]
Sharers = Annotated[Sharing, Holds(_is_sharing, "how many replicas share sequences and experts")]
DigestKey = Annotated[str, Matches(r"-?\d{1,18}(/-?\d{1,18}){1,4}", "two to five numbers with slashes between them")]
"""See `control.coordination.digests`."""
LetterId = Annotated[str, Holds(lambda text: 0 < len(text) <= LONGEST_ID, "a short text")]
"""As of `wire.Letter`."""

Json = Any
"""A value with a format of its own, which the code that uses it checks."""
