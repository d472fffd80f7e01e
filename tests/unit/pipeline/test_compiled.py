# SPDX-License-Identifier: Apache-2.0
"""Compiled functions work where machine code cannot be kept."""

from __future__ import annotations

import pytest
from numba.core.caching import CacheImpl

from megatron_resihp.pipeline.compiled import compiled


def test_compiles_for_this_process_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])

    @compiled
    def double(number: int) -> int:
        return 2 * number

    assert double(3) == 6
