# SPDX-License-Identifier: Apache-2.0
"""Patch: what mixtures of experts report of their balance, summed by the step's agreement instead of Megatron's groups.

Replaces MoEMetricsTracker's own reductions, which need the same layers at the same rank of each replica. Only what is
printed depends on this. May import megatron.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_logging import MetricEntry, destroy_moe_metrics_tracker, get_moe_metrics_tracker

NAMES: Final = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")
"""The metrics that the supported ways of balancing record."""


def do_not_reduce(original: Callable[..., None]) -> Callable[..., None]:
    """The replacement of MoEMetricsTracker._sync_metrics: `tell_sums` has done it."""

    def sync_metrics(tracker: Any, metric_names: Any, pg_collection: Any = None) -> None:
        pass

    return sync_metrics


def width(layers: int) -> int:
    """How many numbers `recorded` gives. `layers`: 0 if sums over all layers are enough."""
    return len(NAMES) * max(layers, 1)


def recorded(sharers: int, layers: int) -> list[float]:
    """What this worker has recorded in the iteration, by NAMES: sums over its micro-batches, of each layer or of all.

    Args:
        sharers: how many workers have the same micro-batches and layers: tensor-parallel members, in all replicas that
            share sequences. Each of them records a part of a sum, or the mean over its own tokens.
        layers: of the model; 0: the sum over all layers is enough.
    """
    metrics, found = get_moe_metrics_tracker().metrics, list[float]()
    for name in NAMES:
        found += _sums(metrics[name], sharers, layers) if name in metrics else [0.0] * max(layers, 1)
    return found


def _sums(entry: MetricEntry, sharers: int, layers: int) -> list[float]:
    # Parts of a sum come with the group that adds them up. Means come with another one, or with none (Megatron 0.18).
    values = entry.values / (sharers if entry.reduce_group is None else 1)
    return values.tolist() if layers else [float(values.sum())]


def tell_sums(sums: Sequence[float], micro_batches: int, layers: int) -> None:
    """Give Megatron's tracker the sums over all workers, so that it prints their mean over the global batch.

    Args:
        sums: of what `recorded` gives.
        micro_batches: of the global batch.
        layers: of the model.
    """
    tracker, own = get_moe_metrics_tracker(), len(sums) // len(NAMES)
    for number, name in enumerate(NAMES):
        totals = sums[number * own : (number + 1) * own]
        if any(totals):
            tracker.ensure_initialized(name, layers)
            # The tracker adds up its layers and divides by what Megatron takes for the number of micro-batches.
            values = tracker.metrics[name].values
            values.zero_()
            values[:own] = values.new_tensor(totals) * (get_num_microbatches() / micro_batches)


def forget() -> None:
    """Drop what an iteration has left that did not end, and the groups of its epoch."""
    destroy_moe_metrics_tracker()
