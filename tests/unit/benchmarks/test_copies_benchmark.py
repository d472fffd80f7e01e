# SPDX-License-Identifier: Apache-2.0
"""Figures of benchmarks/copies.py, from a job's events."""

from __future__ import annotations

import copies
import pytest

from megatron_resihp.cost.profile import DeviceProfile
from megatron_resihp.events.event import Event
from megatron_resihp.events.training import Iteration, OptimizerCopy

PROFILE = DeviceProfile.from_dict(copies.JOBS["moe"].profile(0.5))


def iteration(number: int, duration_s: float | None) -> Iteration:
    return Iteration(
        epoch=0, iteration=number, loss={}, grad_norm=1.0, skipped=False, agreed_epoch=0, duration_s=duration_s
    )


def copy(owner: int, sent: int, exchange_s: float) -> OptimizerCopy:
    return OptimizerCopy(
        owner=owner, steps=4, bytes_kept=3 * sent, bytes_per_step=sent, exchange_s=exchange_s, step_s=0.5
    )


def test_the_longest_exchange_counts_and_the_first_iteration_does_not() -> None:
    events: list[Event] = [
        iteration(1, None), iteration(2, 9.0), iteration(3, 1.0), iteration(4, 3.0),
        copy(0, 1000, 0.01), copy(1, 4000, 0.02),
    ]  # fmt: skip
    found = copies.summarize(events, PROFILE, hidden=32)
    assert (found["iteration_s"], found["iterations"], found["copies"]) == (2.0, 2, 2)
    assert found["cost_percent"] == pytest.approx(1.0)
    assert (found["bytes_per_step"], found["bytes_kept"]) == (4000, 12000)
    assert found["device_bytes_per_step"] == 4000 * 256**2
    assert found["device_exchange_s"] == pytest.approx(0.5 * (1e-5 + 4000 * 256**2 / 25e9))


def test_a_run_without_copies_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="no worker has kept a copy"):
        copies.summarize([iteration(1, None), iteration(2, 1.0), iteration(3, 1.0)], PROFILE, hidden=32)
