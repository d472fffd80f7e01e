# SPDX-License-Identifier: Apache-2.0
"""Layers that compute in 8 bits, by scales of the tensor at hand: whichever workers live, the same tokens are in it.

Transformer Engine's layers do so on GPUs; eight_bits_gpt.py has layers that round likewise on any device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import FP32, Jobs
from stock_runs import like_stock_and_back, stock_steps
from test_expert_parallelism import OPTIMIZER, SHARED, degrees

from megatron_resihp.report.run.summary import compare

pytestmark = pytest.mark.nightly

ROUNDED = Path(__file__).with_name("eight_bits_gpt.py")
EIGHT_BITS: dict[str, Any] = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "train_iters": 14}
EXPERTS: dict[str, Any] = SHARED | EIGHT_BITS
"""Each pair of workers shares the experts."""


@pytest.mark.parametrize("layout", [{}, OPTIMIZER], ids=["plain", "optimizer"])
def test_experts_that_replicas_share(jobs: Jobs, layout: dict[str, Any]) -> None:
    """One pair goes on, and the partner of the dead worker waits for another."""
    job = like_stock_and_back(jobs, layout=EXPERTS | layout, script=ROUNDED)
    assert degrees(job) == [(2, 4), (2, 2), (2, 4)]


def test_rounding_shows(jobs: Jobs) -> None:
    """The negative control: norms of gradients are others without it."""
    layout = EXPERTS | {"train_iters": 6}
    wide = layout | {"fp8_format": None, "fp8_recipe": None}
    rounded, whole = (stock_steps(jobs, 4, ROUNDED, **each) for each in (layout, wide))
    difference = compare(*({number: norm for number, (_, norm) in each.items()} for each in (rounded, whole)))
    assert difference is not None and difference > 10 * FP32.norm
