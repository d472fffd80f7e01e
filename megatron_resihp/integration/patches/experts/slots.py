# SPDX-License-Identifier: Apache-2.0
"""Token dispatchers for experts that are dealt out in unequal numbers.

Megatron's dispatchers take it that each worker has as many experts as any other. Here a dispatcher sees as many slots
for each worker as the fullest has experts. What the router says of experts is put in their slots; an empty slot gets no
tokens, and the worker's own experts, which come first, get theirs. The order of experts stays, and so do all sums. Only
the dispatcher knows of slots: routers, balance, capacity and biases are of the true experts. May import megatron and
this package.
"""

import copy
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

from megatron_resihp.plan.experts import dealt_experts, slots_of


def spread(columns: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of experts as columns of slots; empty slots have zeros, or False.

    Args:
        columns: [tokens, experts].
        slots: of each expert, [experts].
        count: of all slots.

    Returns:
        [tokens, slots]; gradients go back to the experts' columns.
    """
    return columns.new_zeros(len(columns), count).index_copy(1, slots, columns)


class _InSlots:
    """Before one of Megatron's dispatchers: what it is told of a layer's experts is told of slots.

    Args:
        config: the layer's, with the true number of experts.
        pg_collection: the groups of those that share them.

    Raises:
        ValueError: experts' inputs are padded to a capacity, which empty slots would be, too.
    """

    def __init__(self, config: Any, pg_collection: Any) -> None:
        if config.moe_pad_expert_input_to_capacity:
            raise ValueError("experts whose inputs are padded to a capacity can't be dealt out in unequal numbers")
        sharers, sharer = pg_collection.ep.size(), pg_collection.ep.rank()
        dealt = dealt_experts(config.num_moe_experts, sharers)
        each = len(dealt[0])
        self._own, self._count = len(dealt[sharer]), each * sharers
        self._slots = torch.tensor(slots_of(config.num_moe_experts, sharers))
        in_slots = copy.copy(config)
        in_slots.num_moe_experts = self._count
        numbers = list(range(each * sharer, each * (sharer + 1)))
        super().__init__(each, numbers, config=in_slots, pg_collection=pg_collection)  # type: ignore[call-arg]

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Megatron's, of what the router says of experts."""
        self._slots = self._slots.to(routing_map.device)
        routed, weighed = (spread(each, self._slots, self._count) for each in (routing_map, probs))
        found: tuple[torch.Tensor, torch.Tensor] = super().dispatch_preprocess(hidden_states, routed, weighed)  # type: ignore[misc]
        return found

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As Megatron's; the numbers of tokens are of this worker's own experts."""
        tokens, per_slot, weights = super().dispatch_postprocess(hidden_states, probs)  # type: ignore[misc]
        return tokens, per_slot[: self._own], weights


class AllToAllInSlots(_InSlots, MoEAlltoAllTokenDispatcher):
    """Sends each token to the workers that have its experts."""


class AllGatherInSlots(_InSlots, MoEAllGatherTokenDispatcher):
    """Gathers all tokens on each worker."""
