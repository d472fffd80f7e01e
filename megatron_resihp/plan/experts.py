# SPDX-License-Identifier: Apache-2.0
"""Which of a layer's experts each of those that share them has, where their number needn't divide that of the experts.

Imports the standard library and this package's modules.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from megatron_resihp.plan.microbatches import even_counts


def dealt_experts(experts: int, sharers: int) -> tuple[range, ...]:
    """The numbers of each sharer's experts: in a row, and sharers that have one more come first. Where the number of
    sharers divides that of experts, they are Megatron's own.

    Raises:
        ValueError: a sharer would have none.
    """
    if not 1 <= sharers <= experts:
        raise ValueError(f"{sharers} can't share {experts} experts so that each has one")
    ends = accumulate(even_counts(experts, sharers), initial=0)
    return tuple(range(first, end) for first, end in pairwise(ends))


def most_experts(experts: int, sharers: int) -> int:
    """How many experts the sharer with most of them has."""
    return -(-experts // sharers)


def busiest_share(loads: Sequence[float], sharers: int) -> float:
    """Tokens of the sharer whose experts get most of them, over the mean. `loads`: tokens of each expert, not all 0.

    Raises:
        ValueError: a sharer would have no expert.
    """
    return max(sum(loads[own.start : own.stop]) for own in dealt_experts(len(loads), sharers)) * sharers / sum(loads)


def slots_of(experts: int, sharers: int) -> tuple[int, ...]:
    """Each expert's slot, if all sharers have as many slots in a row as the fullest of them has experts. A sharer's
    empty slots are its last ones, so experts stay in order.

    Raises:
        ValueError: a sharer would have no expert.
    """
    dealt = dealt_experts(experts, sharers)
    each = len(dealt[0])
    return tuple(each * sharer + place for sharer, own in enumerate(dealt) for place in range(len(own)))
