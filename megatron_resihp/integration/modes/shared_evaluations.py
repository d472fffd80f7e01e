# SPDX-License-Identifier: Apache-2.0
"""Replicas of a heterogeneous plan share an evaluation; who has a head learns the losses of all micro-batches.

Megatron, which knows one replica then, adds them up and prints them as if that replica had evaluated all. May import
torch, `executor` and this package.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_resihp.executor.groups.side_group import MakeSideGroup
from megatron_resihp.integration.modes.mode import Losses
from megatron_resihp.integration.world.heterogeneous import HeterogeneousView, head_of


class SharedEvaluations:
    """Of one epoch. All workers with a head make it, and call `losses` for each evaluation.

    Args:
        args: Megatron's; they say how many micro-batches an evaluation has.
        make_group: (name, workers) → the group of these workers.
    """

    def __init__(self, args: Any, view: HeterogeneousView, make_group: MakeSideGroup) -> None:
        self._worker = view.worker
        self._group = None
        if not args.eval_iters:
            return
        count = args.eval_global_batch_size // args.eval_micro_batch_size
        replicas, heads = view.evaluation(count), view.evaluating_heads(count)
        self._telling = {head_of(replica)[-1] for replica in replicas}
        if len(replicas) > 1 and view.worker in heads:
            self._group = make_group("evaluations", heads)

    def losses(self, own: Sequence[int], reported: Losses, count: int) -> Losses:
        """What was reported of all micro-batches, in their order. Each number is that of the worker that computed it,
        since all others add zeros.

        Args:
            own: the micro-batches that this worker's replica has evaluated.
            reported: of these, by the loss function; nothing without a head.
            count: of all of them.
        """
        if self._group is None:
            return reported
        first = reported[0]
        sizes = [value.numel() for value in first.values()]
        # They are sums of at most 32 bits, or counts.
        rows = torch.zeros(count, sum(sizes), dtype=torch.float64)
        if self._worker in self._telling:
            rows[list(own)] = torch.stack([_flat(each, first) for each in reported]).cpu()
        self._group.sum(rows)
        named = list(first.items())
        return [
            {name: part.to(value).view_as(value) for (name, value), part in zip(named, row.split(sizes), strict=True)}
            for row in rows
        ]


def _flat(reported: dict[str, Any], names: dict[str, Any]) -> torch.Tensor:
    return torch.cat([reported[name].detach().view(-1).double() for name in names])
