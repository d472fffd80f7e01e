# SPDX-License-Identifier: Apache-2.0
"""The sizes that a --step-batch-size-schedule gives the global batches of a job. Imports `plan.batch_steps` only."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

from megatron_resihp.plan.batch_steps import Steps, iterations_until

MULTIPLES: Final = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def is_followed(values: Mapping[str, Any]) -> bool:
    """Whether the sizes of a job with a schedule are known, as far as its arguments tell."""
    return bool(batch_steps(values))


def batch_steps(values: Mapping[str, Any]) -> Steps:
    """The sizes that a schedule gives a job's batches, without steps that change nothing; empty: there is no schedule,
    or none that can be followed.

    Only for jobs of so many samples: of others Megatron reckons data sets and rates with a batch that is not the
    schedule's.

    Args:
        values: the job's arguments.
    """
    schedule, samples = values["step_batch_size_schedule"], values["train_samples"]
    if schedule is None or not samples or values["train_iters"] or not values["seq_length"]:
        return ()
    try:
        steps = steps_of(schedule, values["seq_length"])
    except ValueError:
        return ()
    # The last iteration begins before the end.
    reached = tuple(step for step in steps if step[0] < samples)
    if not reached or reached[0][0] != 0 or reached[0][1] < 1:
        return ()
    # Megatron asserts that sizes grow.
    if any(later[1] < earlier[1] for earlier, later in pairwise(reached)):
        return ()
    return (reached[0], *(later for earlier, later in pairwise(reached) if later[1] != earlier[1]))


def iterations_of(values: Mapping[str, Any]) -> int | None:
    """The iterations of a job, as Megatron's `update_train_iters` counts them; None: its arguments don't tell.

    Args:
        values: the job's arguments, its global batch size among them.
    """
    if values["train_iters"] or not values["train_samples"]:
        return values["train_iters"]
    samples = int(values["train_samples"])
    if steps := batch_steps(values):
        return iterations_until(steps, samples)
    return samples // int(values["global_batch_size"])


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
