# SPDX-License-Identifier: Apache-2.0
"""Workloads of micro-batches with packed documents, where the mix of documents changes now and then.

Documents come in regimes. In each, part of the tokens is from short documents, and the rest from long ones with a
heavy-tailed length. The short ones are functions and classes of Python's standard library, which is also the demo's
corpus. With documents that are always alike, an iteration's time would be constant and every detector perfect. Imports
numpy, `coding` and `cost.arrays`.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.coding import FILE, decode
from megatron_resihp.cost.arrays import Floats

REGIME_ITERATIONS = (20, 60)
"""Shortest and longest duration of a mix; 40 iterations on average."""
BYTES_PER_TOKEN = 4
"""For source code under usual byte-pair encodings."""
LONG_SHARES = ((0.0, 0.05), (0.85, 1.0))
"""Ranges of the share of tokens in long documents; regimes alternate, as if a corpus is read source by source."""
LONG_MEDIAN = (1.0, 4.0)
"""Range of the median length of long documents, in sequences."""
LONG_SIGMA = 1.0
"""σ of the logarithm of long documents' lengths."""


@dataclass(frozen=True)
class Regime:
    """A mix of documents.

    Attributes:
        iterations: how many iterations it lasts.
        long_share: share of the tokens in long documents, 0 to 1.
        long_median: median length of long documents, in tokens.
    """

    iterations: int
    long_share: float
    long_median: float


@dataclass(frozen=True)
class _Quantiles:
    """The file's document lengths: cumulative shares, and the length in bytes at each share."""

    probabilities: Floats
    quantiles: Floats


class Distribution(NamedTuple):
    """Lengths of documents.

    Attributes:
        probabilities: cumulative shares, ascending from 0 to 1.
        logs: log of the length in tokens at each share.
        mean: mean length in tokens.
    """

    probabilities: NDArray[np.float64]
    logs: NDArray[np.float64]
    mean: float


@cache
def short_documents() -> Distribution:
    """Functions and classes of Python's standard library."""
    text = (files(__package__) / "data" / "python_documents.json").read_text(encoding="utf-8")
    found: _Quantiles = decode(_Quantiles, json.loads(text), FILE)
    probabilities, lengths = found.probabilities, found.quantiles / BYTES_PER_TOKEN
    # Between two quantiles the logarithm grows linearly, so the mean length there is Δl / Δlog l.
    ratios = np.log(lengths[1:] / lengths[:-1])
    means = np.where(ratios > 0, np.diff(lengths) / np.where(ratios > 0, ratios, 1.0), lengths[1:])
    return Distribution(probabilities, np.log(lengths), float(np.diff(probabilities) @ means))


def draw_regimes(iterations: int, sequence: int, rng: np.random.Generator) -> list[Regime]:
    """Regimes for a job of `iterations` iterations with sequences of `sequence` tokens."""
    regimes: list[Regime] = []
    first = int(rng.integers(2))
    while iterations > 0:
        length = min(int(rng.integers(REGIME_ITERATIONS[0], REGIME_ITERATIONS[1] + 1)), iterations)
        long_share = float(rng.uniform(*LONG_SHARES[(first + len(regimes)) % 2]))
        regimes.append(Regime(length, long_share, sequence * float(rng.uniform(*LONG_MEDIAN))))
        iterations -= length
    return regimes


def draw_lengths(regime: Regime, tokens: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Lengths of a regime's documents, which together hold at least `tokens` tokens."""
    short = short_documents()
    mean_long = regime.long_median * np.exp(LONG_SIGMA**2 / 2)
    # Shares are shares of tokens; long documents hold more tokens each, so fewer are drawn.
    long = regime.long_share / mean_long
    fraction_long = long / (long + (1 - regime.long_share) / short.mean)
    mean = fraction_long * mean_long + (1 - fraction_long) * short.mean
    lengths = np.empty(0, dtype=np.int64)
    while (missing := tokens - int(lengths.sum())) > 0:
        count = int(1.1 * missing / mean) + 16
        is_long = rng.random(count) < fraction_long
        logs = np.interp(rng.random(count), short.probabilities, short.logs)
        logs[is_long] = np.log(regime.long_median) + LONG_SIGMA * rng.standard_normal(int(is_long.sum()))
        lengths = np.concatenate([lengths, np.maximum(1, np.exp(logs).astype(np.int64))])
    return lengths


def pack(lengths: NDArray[np.int64], sequence: int, count: int) -> NDArray[np.float64]:
    """Σ l² of each of `count` sequences, filled with the documents in order and cut where a sequence is full.

    Raises:
        ValueError: the documents do not fill the sequences.
    """
    ends = np.cumsum(lengths)
    if ends[-1] < sequence * count:
        raise ValueError(f"documents of {ends[-1]} tokens do not fill {count} sequences of {sequence}")
    # Two sorted runs; where a document ends with its sequence, the piece between the two cuts is empty.
    cuts = np.concatenate([ends[ends < sequence * count], np.arange(1, count + 1) * sequence])
    cuts.sort(kind="stable")
    pieces = np.diff(cuts, prepend=0)
    return np.bincount((cuts - 1) // sequence, weights=pieces.astype(np.float64) ** 2, minlength=count)


def draw_squares(regimes: list[Regime], per_iteration: int, sequence: int, rng: np.random.Generator) -> NDArray[Any]:
    """Σ l² of every micro-batch of one sequence: array [iterations, per_iteration]."""
    parts = []
    for regime in regimes:
        count = regime.iterations * per_iteration
        lengths = draw_lengths(regime, count * sequence, rng)
        parts.append(pack(lengths, sequence, count).reshape(regime.iterations, per_iteration))
    return np.concatenate(parts)
