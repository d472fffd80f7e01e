# SPDX-License-Identifier: Apache-2.0
"""Synthetic series of a job's iteration times, without workers. Imports numpy and `detector`.

Like real ones, they begin slow, become faster, restart their numbering, have spikes, stalls and evaluations, and are
noisy. A kind says what a series contains; a seed and an index select the series.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.input.table import Table

Array = NDArray[np.float64]

TAIL_FREEDOM: Final = 3
"""Degrees of freedom of heavy-tailed noise."""
SKEW: Final = 0.7
"""Standard deviation of the logarithm of skewed noise."""
LARGEST_SLOWDOWN: Final = 2.1
SMALLEST_SLOWDOWN: Final = 1.05
FEWEST_DEVIATIONS: Final = 2.5
"""Fewest standard deviations of the noise in a slowdown."""
REGIME_ROWS: Final = (25, 60)
RAMP: Final = (1, 2, 4, 8)
"""Batch sizes of a ramp-up, relative to the first rows'."""


@dataclass(frozen=True)
class SeriesKind:
    """The properties of a kind of series. Noise is relative, rates are per row.

    Attributes:
        name: of the row in tables.
        noise: standard deviation.
        heavy_tailed: whether the noise is Student's t with 3 degrees of freedom.
        skewed: whether the noise is log-normal, with a long tail to slower times.
        correlation: of the noise from row to row.
        moving: rows over which noise is averaged.
        slower_share: share of random rows that take 8 % longer.
        spikes, stalls: rate of single rows, and of two to three successive rows, that take 1.5 to 4 times as long.
        every: rows between evaluations or saves; `every_rows` rows then take 1.5 to 3 times as long.
        drift: amplitude of the level's oscillation, with a period of `drift_rows`.
        faster: between rows 60 and 120, the job becomes faster by this share.
        begins_slow: whether the first 15 to 45 rows take 10 to 40 % longer.
        regimes: whether documents come in regimes that the column `squares` explains.
        ramp: whether the batch grows, as the column `tokens` says.
        restarts: how often the numbering starts over, each time with a slow row.
        early: whether the slowdown lasts from row 11 to 60.
        factor: of the slowdown; 0 means that it is drawn.
        rows: rows of a series.
        pink: whether the noise is 1 / f, correlated over all times.
        bursts: whether the noise comes in spells of 40 rows that are up to 3 times as noisy.
        repeated: whether each time is recorded for two successive rows.
        scored: whether the goals apply to it; other kinds are harder.
        held_out: whether it was first drawn after all tuning.
    """

    name: str
    noise: float = 0.02
    heavy_tailed: bool = False
    skewed: bool = False
    correlation: float = 0.0
    moving: int = 1
    slower_share: float = 0.0
    spikes: float = 0.0
    stalls: float = 0.0
    every: int = 0
    every_rows: int = 1
    drift: float = 0.0
    drift_rows: int = 300
    faster: float = 0.0
    begins_slow: bool = False
    regimes: bool = False
    ramp: bool = False
    restarts: int = 0
    early: bool = False
    factor: float = 0.0
    rows: int = 400
    pink: bool = False
    bursts: bool = False
    repeated: bool = False
    scored: bool = True
    held_out: bool = False

    @property
    def recurs(self) -> bool:
        """Whether its disturbances come again and again, so that the first one may alarm."""
        return self.stalls > 0 or self.every > 0


KINDS: Final = (
    SeriesKind("noise_1", noise=0.01),
    SeriesKind("noise_3", noise=0.03),
    SeriesKind("noise_8", noise=0.08),
    SeriesKind("noise_8_by_30", noise=0.08, factor=1.3),
    SeriesKind("heavy_tailed", noise=0.03, heavy_tailed=True),
    SeriesKind("heavy_tailed_8", noise=0.08, heavy_tailed=True),
    SeriesKind("correlated", noise=0.03, correlation=0.5),
    SeriesKind("correlated_8", noise=0.08, correlation=0.5),
    SeriesKind("correlated_7_8", noise=0.08, correlation=0.7),
    SeriesKind("moving", noise=0.05, moving=4),
    SeriesKind("least", noise=0.01, factor=1.025),
    SeriesKind("spikes", spikes=0.03),
    SeriesKind("stalls", stalls=0.006),
    SeriesKind("evaluations", every=25),
    SeriesKind("drift", noise=0.01, drift=0.02),
    SeriesKind("early", noise=0.03, early=True),
    SeriesKind("early_8", noise=0.08, early=True),
    SeriesKind("faster", noise=0.03, faster=0.2),
    SeriesKind("begins_slow", noise=0.03, begins_slow=True),
    SeriesKind("regimes", noise=0.02, regimes=True),
    SeriesKind("ramp", noise=0.02, ramp=True),
    SeriesKind("restarts", noise=0.03, restarts=2),
    SeriesKind("skewed", noise=0.05, skewed=True, scored=False),
    SeriesKind("two_humps", noise=0.01, slower_share=0.15, scored=False),
    SeriesKind("all_at_once", noise=0.05, correlation=0.3, spikes=0.02, every=50, drift=0.01, scored=False),
    SeriesKind("long_saves", noise=0.02, every=60, every_rows=2, scored=False),
    SeriesKind("slow_drift", noise=0.03, drift=0.02, drift_rows=1200, rows=2000, scored=False),
    SeriesKind("pink", noise=0.03, pink=True, scored=False),
    SeriesKind("bursts", noise=0.02, bursts=True, scored=False),
    SeriesKind("repeated", noise=0.03, repeated=True, scored=False),
    SeriesKind("moving_2", noise=0.03, moving=2, scored=False, held_out=True),
    SeriesKind("moving_8", noise=0.05, moving=8, scored=False, held_out=True),
    SeriesKind("heavy_correlated", noise=0.04, heavy_tailed=True, correlation=0.6, scored=False, held_out=True),
    SeriesKind("seasonal", noise=0.03, drift=0.03, drift_rows=24, scored=False, held_out=True),
    SeriesKind("correlated_bursts", noise=0.02, bursts=True, correlation=0.5, scored=False, held_out=True),
    SeriesKind("pink_6", noise=0.06, pink=True, scored=False, held_out=True),
    SeriesKind("moving_pairs", noise=0.04, moving=3, repeated=True, spikes=0.02, scored=False, held_out=True),
)


@dataclass(frozen=True)
class SlowSpell:
    """A slowdown with known truth.

    Attributes:
        first, last: rows, from 1.
        factor: on the rows' times.
    """

    first: int
    last: int
    factor: float


@dataclass(frozen=True)
class Series:
    """One series; arrays have an element for each row.

    Attributes:
        seconds: of the iterations.
        numbers: the iterations' own numbers, which start over at restarts.
        tokens, squares: the workload, NaN if the series has no such column.
        spell: the slowdown; None in a healthy series.
    """

    seconds: Array
    numbers: NDArray[np.int64]
    tokens: Array
    squares: Array
    spell: SlowSpell | None

    def table(self) -> Table:
        """The table that `resihp detect` would read from a file."""
        rows = np.arange(1, self.seconds.size + 1)
        segments = np.concatenate([[0], np.cumsum(np.diff(self.numbers) <= 0)])
        seconds, tokens, squares = (each[:, None] for each in (self.seconds, self.tokens, self.squares))
        return Table(np.zeros(1, np.int64), self.numbers, segments, rows, seconds, tokens, squares, False, ())


def draw_series(kind: SeriesKind, seed: int, index: int, slow: bool) -> Series:
    """Series number `index` of a kind.

    Args:
        kind: its properties.
        seed: of the benchmark.
        index: number of the series.
        slow: whether it has a slowdown.
    """
    random = np.random.default_rng([seed, index, slow, *kind.name.encode()])
    level, numbers = np.ones(kind.rows), np.arange(1, kind.rows + 1)
    tokens, squares = np.full((2, kind.rows), np.nan)
    if kind.drift:
        phase = random.uniform(0, 2 * np.pi)
        level *= 1 + kind.drift * np.sin(2 * np.pi * np.arange(kind.rows) / kind.drift_rows + phase)
    earliest = 40
    if kind.faster:
        at = int(random.integers(60, 120))
        level[at:] *= 1 - kind.faster
        earliest = at + 35
    if kind.begins_slow:
        at = int(random.integers(15, 45))
        level[:at] *= random.uniform(1.1, 1.4)
        earliest = at + 35
    if kind.regimes:
        tokens, squares = _regimes(kind.rows, random)
        level *= 0.6 * tokens / 8192 + 0.4 * squares / 2e7
        earliest = 150
    if kind.ramp:
        tokens, squares = _ramp(kind.rows)
        level *= 0.15 + 0.85 * tokens / 8192
        earliest = 200
    if kind.restarts:
        earliest = _restart(kind, level, numbers, random)
    seconds = level * _noise(kind, random) * _disturbances(kind, random)
    spell = _spell(kind, earliest, random) if slow else None
    if spell:
        seconds[spell.first - 1 : spell.last] *= spell.factor
    return Series(random.uniform(0.3, 30.0) * seconds, numbers, tokens, squares, spell)


def _spell(kind: SeriesKind, earliest: int, random: np.random.Generator) -> SlowSpell:
    least = max(np.log(SMALLEST_SLOWDOWN), FEWEST_DEVIATIONS * kind.noise)
    factor = float(np.exp(random.uniform(least, np.log(LARGEST_SLOWDOWN))))
    factor = kind.factor or factor
    if kind.early:
        return SlowSpell(11, 60, max(factor, 1.15))
    rows = int(random.integers(40, 100))
    latest = min(kind.rows, 400) - rows - 45
    first = int(random.integers(earliest, max(latest, earliest + 1)))
    return SlowSpell(first, first + rows - 1, factor)


def _noise(kind: SeriesKind, random: np.random.Generator) -> Array:
    rows = kind.rows
    if kind.heavy_tailed:
        values = random.standard_t(TAIL_FREEDOM, rows) * np.sqrt(1 - 2 / TAIL_FREEDOM)
    elif kind.skewed:
        values = np.exp(SKEW * random.standard_normal(rows) - SKEW**2 / 2)
        values = (values - 1) / np.sqrt(np.exp(SKEW**2) - 1)
    else:
        values = random.standard_normal(rows)
    if kind.pink:
        spectrum = np.fft.rfft(values)
        spectrum[1:] /= np.sqrt(np.arange(1, spectrum.size))
        values = np.fft.irfft(spectrum, rows)
        values = (values - values.mean()) / values.std()
    if kind.bursts:
        values *= np.repeat(random.uniform(1, 3, rows // 40 + 1), 40)[:rows]
    if kind.repeated:
        values = np.repeat(values[: rows // 2 + 1], 2)[:rows]
    if kind.correlation:
        for row in range(1, rows):
            values[row] = kind.correlation * values[row - 1] + np.sqrt(1 - kind.correlation**2) * values[row]
    if kind.moving > 1:
        padded = np.concatenate([random.standard_normal(kind.moving - 1), values])
        values = np.convolve(padded, np.full(kind.moving, kind.moving**-0.5), "valid")
    factor = np.maximum(1 + kind.noise * values, 0.6)
    return np.where(random.random(rows) < kind.slower_share, 1.08, 1.0) * factor


def _disturbances(kind: SeriesKind, random: np.random.Generator) -> Array:
    factor = np.ones(kind.rows)
    for start in np.flatnonzero(random.random(kind.rows) < kind.spikes).tolist():
        factor[start] = random.uniform(1.5, 4)
    for start in np.flatnonzero(random.random(kind.rows) < kind.stalls).tolist():
        factor[start : start + int(random.integers(2, 4))] = random.uniform(1.5, 4)
    if kind.every:
        size = random.uniform(1.5, 3)
        for start in range(kind.every - 1, kind.rows, kind.every):
            factor[start : start + kind.every_rows] = size
    return factor


def _regimes(rows: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Two alternating mixes of documents."""
    squares: list[float] = []
    long = bool(random.integers(2))
    while len(squares) < rows:
        span = int(random.integers(*REGIME_ROWS))
        squares += random.uniform(*((2.5e7, 4e7) if long else (5e6, 1.2e7)), span).tolist()
        long = not long
    return np.full(rows, 8192.0), np.array(squares[:rows])


def _ramp(rows: int) -> tuple[Array, Array]:
    step = np.minimum(np.arange(rows) // 40, len(RAMP) - 1)
    tokens = 8192.0 * np.array(RAMP, dtype=np.float64)[step]
    return tokens, tokens * 1024


def _restart(kind: SeriesKind, level: Array, numbers: NDArray[np.int64], random: np.random.Generator) -> int:
    """Start the numbering over some rows back, as from a checkpoint, or at 1; returns where a slowdown may begin."""
    places = np.sort(random.choice(np.arange(60, 200), kind.restarts, replace=False))
    for place in places.tolist():
        first = int(random.choice([1, max(int(numbers[place - 1]) - 20, 1)]))
        numbers[place:] = first + np.arange(kind.rows - place)
        level[place] *= 2.0
    return int(places[-1]) + 35
