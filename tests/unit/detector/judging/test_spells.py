# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a unit's slow time decides how soon it may recover from the next one."""

from __future__ import annotations

import pytest

from megatron_resihp.detector.judging.sequential import RUNS
from megatron_resihp.detector.judging.spells import PROVEN, Spells
from megatron_resihp.detector.verdict import Change


@pytest.mark.parametrize(("onset", "shortest"), [(110, PROVEN), (200, RUNS[0]), (50, RUNS[0])])
def test_only_who_becomes_slow_again_soon_has_relapsed(onset: int, shortest: int) -> None:
    """Iterations may go back, where a job restarts."""
    spells = Spells(1)
    spells.told(0, Change.RECOVERY, 100)
    spells.told(0, Change.ONSET, onset)
    assert spells.shortest_window(0) == shortest
