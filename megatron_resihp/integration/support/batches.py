# SPDX-License-Identifier: Apache-2.0
"""The sizes that a --step-batch-size-schedule gives the global batches of a job. Imports the standard library only."""

from collections.abc import Mapping
from typing import Any, Final

MULTIPLES: Final = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def has_one_batch(values: Mapping[str, Any]) -> bool:
    """Whether all iterations of a job with a schedule have as many samples, as far as its arguments tell."""
    return batch_of(values) is not None


def batch_of(values: Mapping[str, Any]) -> int | None:
    """The global batch that a schedule gives every iteration; None: there is no schedule, or no such batch.

    Only for jobs of so many samples: of others Megatron reckons data sets and rates with a batch that is not the
    schedule's.

    Args:
        values: the job's arguments.
    """
    schedule, samples = values["step_batch_size_schedule"], values["train_samples"]
    if schedule is None or not samples or values["train_iters"] or not values["seq_length"]:
        return None
    try:
        steps = steps_of(schedule, values["seq_length"])
    except ValueError:
        return None
    # An iteration has the size of the last step that begins at or before it, and the last one begins before the end.
    sizes = {size for start, size in steps if start < samples}
    return sizes.pop() if len(sizes) == 1 and steps[0][0] == 0 else None


def steps_of(schedule: str, seq_length: int) -> list[tuple[int, int]]:
    """Where each step begins, in samples, and its size, as Megatron's StepBatchsizeNumMicroBatchesCalculator reads it.

    Raises:
        ValueError: Megatron can't read it.
    """
    entries = [entry.partition(":") for entry in schedule.replace(",", " ").split()]
    return sorted((_number(start) // seq_length, _number(size)) for start, _, size in entries)


def _number(text: str) -> int:
    text = text.strip().upper()
    multiple = MULTIPLES.get(text[-1:], 1)
    return int(float(text[:-1] if multiple > 1 else text) * multiple)
