# SPDX-License-Identifier: Apache-2.0
"""What a schedule of batch sizes comes to, held against Megatron's own calculator."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator
from megatron.training.training import update_train_iters

from megatron_resihp.integration.support.batches import batch_steps, iterations_of, steps_of
from megatron_resihp.plan.batch_steps import Steps, consumed_after, size_at

SEQUENCE = 8


def steps(schedule: str | None, **others: Any) -> Steps:
    values = {"train_samples": 100, "train_iters": None, "seq_length": SEQUENCE}
    return batch_steps({**values, "step_batch_size_schedule": schedule, **others})


def sizes_in(schedule: str, samples: int) -> list[int]:
    """Of all iterations of a job, by Megatron's calculator."""
    calculator = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, schedule, SEQUENCE)
    sizes, consumed = [], 0
    while consumed < samples:
        calculator.update(consumed, consistency_check=False)
        sizes.append(calculator.get_current_global_batch_size())
        consumed += sizes[-1]
    return sizes


@given(
    more=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=4), first=st.integers(1, 9),
    samples=st.integers(1, 100),
)  # fmt: skip
def test_batches_have_the_sizes_that_megatron_gives_them(more: list[tuple[int, int]], first: int, samples: int) -> None:
    """`more`: how much later each further step begins, and how much larger its batches are."""
    pairs = [(0, first)]
    for later, larger in more:
        pairs.append((pairs[-1][0] + later, pairs[-1][1] + larger))
    schedule = " ".join(f"{start * SEQUENCE}:{size}" for start, size in pairs)
    found, sizes = steps(schedule, train_samples=samples), sizes_in(schedule, samples)
    assert len({size for _, size in found}) == len(found), "what changes nothing is no step"
    consumed = list(accumulate(sizes, initial=0))
    assert [size_at(found, each) for each in consumed[:-1]] == sizes
    assert [consumed_after(found, iteration - 1) for iteration in range(1, len(consumed) + 1)] == consumed
    values = {"train_samples": samples, "train_iters": None, "seq_length": SEQUENCE, "global_batch_size": first}
    assert iterations_of({**values, "step_batch_size_schedule": schedule}) == len(sizes)


@pytest.mark.parametrize("samples", [1, 4, 43, 44])
def test_iterations_of_so_many_samples_are_those_that_megatron_sets(samples: int) -> None:
    values = {"train_samples": samples, "train_iters": None, "global_batch_size": 4, "step_batch_size_schedule": None}
    args = SimpleNamespace(**values)
    update_train_iters(args)
    assert iterations_of(values) == args.train_iters
    assert iterations_of(values | {"train_samples": None, "train_iters": 7}) == 7


@pytest.mark.parametrize("schedule", ["0:384 200B:768 400B:1152", "0:16,2.4B:320", "0:1K 1T:2k", " 0:4  1M:8 "])
def test_schedules_are_read_as_megatron_does(schedule: str) -> None:
    expected = StepBatchsizeNumMicroBatchesCalculator._parse_schedule(schedule, 4096)
    assert steps_of(schedule, 4096) == expected


def test_there_are_none_where_batches_shrink_or_megatron_reckons_with_others() -> None:
    assert steps("0:4 400:4 1K:8") == ((0, 4),), "the last step begins after the end"
    assert steps("0:4 400:8") == ((0, 4), (50, 8))
    assert steps("0:8 400:4") == (), "Megatron asserts that they grow"
    assert steps("100:4") == steps("0") == steps("") == (), "Megatron refuses these"
    assert steps("0:4", train_samples=None, train_iters=10) == ()
    assert steps(None) == ()
