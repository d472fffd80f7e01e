# SPDX-License-Identifier: Apache-2.0
"""What a schedule of batch sizes comes to, held against Megatron's own calculator."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from megatron_resihp.integration.support.batches import batch_of, steps_of

SEQUENCE = 8


def batch(schedule: str | None, **others: Any) -> int | None:
    values = {"train_samples": 100, "train_iters": None, "seq_length": SEQUENCE}
    return batch_of({**values, "step_batch_size_schedule": schedule, **others})


def sizes_in(schedule: str, samples: int) -> set[int]:
    """Of all iterations of a job, by Megatron's calculator."""
    calculator = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, schedule, SEQUENCE)
    sizes, consumed = set(), 0
    while consumed < samples:
        calculator.update(consumed, consistency_check=False)
        sizes.add(calculator.get_current_global_batch_size())
        consumed += calculator.get_current_global_batch_size()
    return sizes


@given(
    steps=st.dictionaries(st.integers(1, 120), st.integers(1, 9), max_size=4), first=st.integers(1, 9),
    samples=st.integers(1, 100),
)  # fmt: skip
def test_a_batch_is_that_of_all_iterations(steps: dict[int, int], first: int, samples: int) -> None:
    schedule = " ".join(f"{start * SEQUENCE}:{size}" for start, size in ({0: first} | steps).items())
    found, sizes = batch(schedule, train_samples=samples), sizes_in(schedule, samples)
    assert found is None or sizes == {found}
    # A step that begins in the last iteration is not reached, and not accepted either.
    reached = {size for start, size in ({0: first} | steps).items() if start < samples}
    assert (found is None) == (len(reached) > 1)


@pytest.mark.parametrize("schedule", ["0:384 200B:768 400B:1152", "0:16,2.4B:320", "0:1K 1T:2k", " 0:4  1M:8 "])
def test_schedules_are_read_as_megatron_does(schedule: str) -> None:
    expected = StepBatchsizeNumMicroBatchesCalculator._parse_schedule(schedule, 4096)
    assert steps_of(schedule, 4096) == expected


def test_there_is_none_where_it_would_change_or_megatron_reckons_with_another() -> None:
    assert batch("0:4 400:4 1K:8") == 4
    assert batch("0:4 400:8") is None, "it changes in the middle"
    assert batch("100:4") is None and batch("0") is None and batch("") is None, "Megatron refuses these"
    assert batch("0:4", train_samples=None, train_iters=10) is None
    assert batch(None) is None
