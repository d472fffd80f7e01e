# SPDX-License-Identifier: Apache-2.0
"""Patch: Megatron's count of packed documents, from which it tells floating-point operations.

Replaces training.consume_seqlen_stats_in_iteration. It sums over the world if the worker has seen a document, and takes
it that all have, each micro-batch as often as a model-parallel group has members. Under a heterogeneous plan a stage
may have no work, and a worker several chunks that see the same documents; so there the first chunk's are counted, and
summed by the step's agreement. May import megatron and this package.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.training import training

from megatron_resihp.integration.modes.mode import DocumentCounts
from megatron_resihp.integration.runtime import Runtime


def are_packed(args: Any) -> bool:
    """Whether samples are packed documents, whose bounds attention respects; not every Megatron has the flag."""
    return bool(getattr(args, "dataloader_inter_document_masking", False))


def seen_so_far() -> torch.Tensor | None:
    """Megatron's sums of l and l² over the packed documents of this iteration so far, as its forward step adds to
    them; None while it has seen no packed document."""
    if not training._seqlen_stats_active:
        return None
    return training._seqlen_stats_in_iteration.clone()


def seen_since(before: torch.Tensor | None) -> torch.Tensor | None:
    """What has been added since `seen_so_far` said `before`, on the device; None while there is no packed document."""
    after = seen_so_far()
    return after if after is None or before is None else after - before


def forget() -> None:
    """Drop what an iteration has seen that did not end."""
    if training._seqlen_stats_in_iteration is not None:
        training._seqlen_stats_in_iteration.zero_()
    training._seqlen_stats_active = False


def wrap_consume(runtime: Runtime, original: Callable[[], DocumentCounts]) -> Callable[[], DocumentCounts]:
    """The replacement: as the plan's mode counts."""

    @functools.wraps(original)
    def consume_seqlen_stats_in_iteration() -> DocumentCounts:
        return runtime.mode.consume_documents(original)

    return consume_seqlen_stats_in_iteration
