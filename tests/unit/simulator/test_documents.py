# SPDX-License-Identifier: Apache-2.0
"""Documents: what packing does with them, and that their mix changes."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.simulator.documents import LONG_SHARES, Regime, draw_lengths, draw_regimes, draw_squares, pack


def test_documents_are_cut_where_a_sequence_is_full() -> None:
    assert pack(np.array([6, 3, 5, 9]), sequence=10, count=2).tolist() == [6**2 + 3**2 + 1**2, 4**2 + 6**2]


def test_too_few_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fill"):
        pack(np.array([5, 4]), sequence=10, count=1)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 40))
def test_a_sequence_costs_most_as_one_document_and_least_as_single_tokens(lengths: list[int], sequence: int) -> None:
    count = sum(lengths) // sequence
    if count:
        squares = pack(np.array(lengths), sequence, count)
        assert np.all((squares >= sequence) & (squares <= sequence**2))


def test_regimes_fill_the_job_and_alternate_between_short_and_long_documents() -> None:
    regimes = draw_regimes(300, 8192, np.random.default_rng(1))
    assert sum(regime.iterations for regime in regimes) == 300
    is_long = [regime.long_share > LONG_SHARES[0][1] for regime in regimes]
    assert all(one != other for one, other in pairwise(is_long))


def test_the_share_of_tokens_in_long_documents_is_the_regimes() -> None:
    lengths = draw_lengths(Regime(1, 0.5, 200_000.0), 400_000_000, np.random.default_rng(2))
    # No function of the corpus is longer than this in tokens, and hardly any of the long documents is shorter.
    assert lengths[lengths > 30_000].sum() / lengths.sum() == pytest.approx(0.5, abs=0.03)


def test_long_documents_cost_more_attention() -> None:
    regimes = [Regime(20, 0.0, 8192.0), Regime(30, 1.0, 8192.0)]
    squares = draw_squares(regimes, 8, 8192, np.random.default_rng(3))
    assert squares.shape == (50, 8)
    assert squares[20:].mean() > 3 * squares[:20].mean()
