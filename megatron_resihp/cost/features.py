"""What of a micro-batch decides its cost: tokens N and the sum of squared document lengths Σ l². Imports numpy.

Attention inside a document costs l², everything else costs l: ResiHP (arXiv 2605.06374), section on the predictor.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Workload(NamedTuple):
    """Features of a micro-batch: `tokens` is N, `squares` is Σ l² in tokens²."""

    tokens: float
    squares: float


def packed(cu_seqlens: ArrayLike) -> Workload:
    """Workload of packed documents, from their cumulative lengths [0, l₁, l₁ + l₂, …] in tokens.

    Raises:
        ValueError: the lengths do not grow from 0.
    """
    ends = np.asarray(cu_seqlens, dtype=np.float64).reshape(-1)
    lengths = np.diff(ends)
    if ends.size == 0 or ends[0] != 0 or not (lengths >= 0).all():
        raise ValueError("cumulative document lengths must start at 0 and never fall")
    return Workload(float(ends[-1]), float(lengths @ lengths))


def unpacked(sequences: int, sequence_length: int) -> Workload:
    """Workload of plain sequences, each one document: N and N · sequence length."""
    tokens = float(sequences * sequence_length)
    return Workload(tokens, tokens * sequence_length)
