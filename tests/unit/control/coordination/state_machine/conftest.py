# SPDX-License-Identifier: Apache-2.0
"""Each scenario of the state machine is replayed from what was recorded of it, and decides the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from replayed import replay_all


@pytest.fixture(autouse=True)
def _replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While what a test has patched still is."""
    yield
    replay_all()
