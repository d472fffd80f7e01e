# SPDX-License-Identifier: Apache-2.0
"""How unevenly a mixture's experts are used, counted in a few iterations and summed by the step's agreement.

Plans are weighed by it: where experts are shared out anew, the worker with the busiest ones decides how long a layer
takes, and how much memory its activations need. May import torch, megatron, `plan` and `events`.
"""

import statistics
from collections.abc import Sequence
from typing import Any, Final

import torch
from megatron.core.transformer.moe.router import Router
from torch.utils.hooks import RemovableHandle

from megatron_resihp.events.training import ExpertLoads
from megatron_resihp.plan.experts import busiest_share

EVERY: Final = 50
FIRST: Final = 2
"""Tokens are counted in this iteration and in every `EVERY`th one after it: loads change slowly, and a count costs a
sum for each layer and micro-batch."""
CHANGE: Final = 0.1
"""By how much a share must have changed to be told again."""


class LoadCounter:
    """One for each worker.

    Args:
        layers: of the model; those of multi-token prediction aside, which planners take for others like these.
        experts: of a layer; 0: there are none.
        sharers: how many workers share a layer's experts in the job's own layout; alone, no one counts.
    """

    def __init__(self, layers: int, experts: int, sharers: int) -> None:
        self._layers, self._experts, self._sharers = layers, experts if sharers > 1 else 0, sharers
        self._hooks: list[RemovableHandle] = []
        self._counts: dict[int, torch.Tensor] = {}
        self._agreed: list[float] = []
        self._told: tuple[float, ...] = ()

    def width(self, iteration: int) -> int:
        """How many numbers are agreed on in an iteration; all workers find the same."""
        return self._layers * self._experts if iteration % EVERY == FIRST else 0

    def begin(self, model: Sequence[Any], iteration: int) -> None:
        """An attempt at an iteration begins."""
        self._end()
        self._counts = {}
        if self.width(iteration):
            modules = (module for chunk in model for module in chunk.modules())
            routers = [module for module in modules if isinstance(module, Router) and not module.is_mtp_layer]
            self._hooks = [each.register_forward_hook(self._count) for each in routers]

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @torch.no_grad()
    def _count(self, router: Any, _: Any, routed: tuple[torch.Tensor, torch.Tensor]) -> None:
        # Which tokens go to which expert, [tokens, experts].
        counts, before = routed[1].sum(dim=0), self._counts.get(router.layer_number)
        self._counts[router.layer_number] = counts if before is None else before + counts

    def counted(self) -> torch.Tensor:
        """[layers × experts] tokens that this worker has routed; 0 in layers that it doesn't have."""
        self._end()
        table = torch.zeros(self._layers, self._experts, dtype=torch.float64)
        if self._counts:
            # Together: each copy to the host waits for the device.
            table[[number - 1 for number in self._counts]] = torch.stack([*self._counts.values()]).double().cpu()
        return table.view(-1)

    def agreed(self, counts: torch.Tensor) -> None:
        """Keep what all workers have counted together; empty in most iterations."""
        self._agreed = counts.tolist()

    def news(self, iteration: int) -> tuple[ExpertLoads, ...]:
        """What the log is to have of an iteration: one event, or none where it would tell nothing new."""
        counts = self._agreed
        layers = [counts[first : first + self._experts] for first in range(0, len(counts), self._experts or 1)]
        shares = _busiest_shares([each for each in layers if any(each)], self._sharers)
        if not shares or not _have_changed(self._told, shares):
            return ()
        self._told = shares
        return (ExpertLoads(iteration=iteration, busiest_shares=shares),)


def _busiest_shares(layers: Sequence[Sequence[float]], most: int) -> tuple[float, ...]:
    """For 1, 2, … `most` sharers, the mean over layers; empty if no layer has counted any tokens."""
    each = [[busiest_share(layer, sharers) for layer in layers] for sharers in range(1, most + 1)]
    return tuple(round(statistics.fmean(shares), 3) for shares in each if shares)


def _have_changed(before: Sequence[float], after: Sequence[float]) -> bool:
    return len(before) != len(after) or any(abs(new - old) > CHANGE for old, new in zip(before, after, strict=True))
