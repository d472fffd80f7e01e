# SPDX-License-Identifier: Apache-2.0
"""What is reported of predictions of further tokens, summed by the step's agreement instead of Megatron's groups.

Megatron's tracker averages over replicas as if all had as many micro-batches. It reduces nothing if it has no groups,
so nothing of Megatron is replaced. Only what is logged depends on this. May import megatron.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_resihp.integration import releases

TRACKER: Final[dict[str, Any]] = MTPLossLoggingHelper.tracker
GROUPS: Final = ("reduce_group", "avg_group")
RUNNING: Final = "cumulative_"
"""With this begin the tracker's sums since the job's start."""


def width(depths: int | None) -> int:
    """How many numbers `recorded` gives. `depths`: further tokens that are predicted."""
    return len(releases.current().prediction_metrics) * (depths or 0)


def recorded(depths: int) -> list[float]:
    """What this worker has recorded in the iteration: for each metric and depth the sum over its micro-batches."""
    found: list[float] = []
    for name in releases.current().prediction_metrics:
        found += TRACKER[name].tolist() if name in TRACKER else [0.0] * depths
    return found


def tell_sums(sums: Sequence[float], micro_batches: int) -> None:
    """Give Megatron's tracker the sums over the global batch.

    Args:
        sums: of what `recorded` gives.
        micro_batches: of the global batch.
    """
    names = releases.current().prediction_metrics
    depths = len(sums) // len(names)
    for number, name in enumerate(names):
        TRACKER[name] = torch.tensor(sums[number * depths : (number + 1) * depths], device=torch.cuda.current_device())
    # Megatron divides losses by what it takes for the number of micro-batches.
    TRACKER[names[0]] *= get_num_microbatches() / micro_batches
    TRACKER.update(dict.fromkeys(GROUPS))


def forget() -> None:
    """Drop what an attempt at an iteration has left, and the groups of its epoch."""
    for name in (*releases.current().prediction_metrics, *GROUPS):
        TRACKER.pop(name, None)


def running_sums() -> dict[str, torch.Tensor]:
    """What the tracker has summed up since the job's start, without waiting for the device."""
    return {name: value.clone() for name, value in TRACKER.items() if name.startswith(RUNNING)}


def restore_running_sums(sums: Mapping[str, Any]) -> None:
    """Let the tracker go on from these; lists are what tensors became on their way through the coordinator."""
    for name in [name for name in TRACKER if name.startswith(RUNNING)]:
        del TRACKER[name]
    for name, value in sums.items():
        whole = torch.tensor(value, device=torch.cuda.current_device()) if isinstance(value, list) else value
        TRACKER[name] = whole.clone()
