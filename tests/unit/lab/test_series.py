# SPDX-License-Identifier: Apache-2.0
"""Synthetic series: the same for the same seed, slow where they say so, and scored as the docstring says."""

import numpy as np
import pytest

from megatron_resihp.lab.detection.series import KINDS, Series, SeriesKind, SlowSpell, draw_series
from megatron_resihp.lab.detection.series_scoring import score, score_kind, this_detector


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_series_is_its_seed_and_slow_where_it_says_so(kind: SeriesKind) -> None:
    series, again = (draw_series(kind, 1, 0, slow=True) for _ in range(2))
    assert np.array_equal(series.seconds, again.seconds)
    assert (series.seconds > 0).all()
    assert series.spell is not None
    assert series.spell.last + 30 <= series.seconds.size


def test_what_counts_is_the_first_verdict_in_time_and_the_end_of_the_spell() -> None:
    nothing = np.full(200, np.nan)
    series = Series(np.ones(200), np.arange(1, 201), nothing, nothing, SlowSpell(101, 150, 1.3))
    kind, recurring = SeriesKind("plain"), SeriesKind("saves", every=50)
    good = score(kind, series, lambda _: ([104], [153]))
    assert (good.found, good.recovered, good.latencies, good.false_alarms, good.rows) == (1, 1, (4,), 0, 150)
    late = score(kind, series, lambda _: ([40, 135], [153]))
    assert (late.found, late.recovered, late.false_alarms) == (0, 0, 1)
    assert score(recurring, series, lambda _: ([40, 60], [])).false_alarms == 1


def test_a_few_series_are_judged_rightly() -> None:
    found = score_kind(next(kind for kind in KINDS if kind.name == "faster"), 1, 2, this_detector)
    assert (found.slow, found.found, found.recovered, found.false_alarms) == (2, 2, 2, 0)
