# SPDX-License-Identifier: Apache-2.0
"""What is known of a worker while it is in one of pretrain's calls, or on its way to another epoch."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.control.worker.errors import EpochBroken
from megatron_resihp.executor.groups.waiting import Waiter
from megatron_resihp.integration.loop import course

AHEAD_S = 100.0


def test_a_thread_that_hangs_anywhere_is_seen_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of state, too, and where a device holds up the host: then others are looked for."""
    waiter, seen = Waiter(lambda: False), []

    def call() -> str:
        seen.append(waiter.longest_s(time.monotonic() + AHEAD_S))
        if len(seen) == 1:
            raise EpochBroken("worker 3")
        return "returned"

    def recover(runtime: Any, error: Exception) -> None:
        seen.append(waiter.longest_s(time.monotonic() + AHEAD_S))

    monkeypatch.setattr(course, "recover", recover)
    runtime: Any = SimpleNamespace(
        calls=SimpleNamespace(made=[call], position=0, checkpointing_context={}),
        view=SimpleNamespace(works=True), communicators=SimpleNamespace(waiter=waiter),
    )  # fmt: skip
    assert course.follow(runtime) == "returned"
    assert len(seen) == 3 and min(seen) >= AHEAD_S
    assert waiter.longest_s(time.monotonic() + AHEAD_S) == 0
