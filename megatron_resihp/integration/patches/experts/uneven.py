# SPDX-License-Identifier: Apache-2.0
"""Patches: layers whose experts are dealt out in unequal numbers.

Megatron's layers, dispatchers and checkpoints assume that all workers that share a layer's experts have as many. Here a
layer has the modules of its own experts only, its dispatcher sees slots (`slots.py`), and a checkpoint has each expert
under its number among all of its layer, as any other. Where numbers are equal, all is Megatron's own. May import
megatron, `plan` and this package.
"""

import copy
import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from megatron_resihp.integration.patch import Patch
from megatron_resihp.integration.patches.experts.slots import AllGatherInSlots, AllToAllInSlots
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.world.heterogeneous_groups import StageGroup
from megatron_resihp.plan.experts import dealt_experts

MOE: Final = "megatron.core.transformer.moe"
OF_ONE_EXPERT: Final = re.compile(r"(linear_fc[12]\.)(?:(weight|bias)0|(_extra_state))$")
"""What Megatron calls the state of a layer of grouped products that has one expert."""
DISPATCHER: Final = ("num_local_experts", "local_expert_indices", "config", "pg_collection")


def uneven_patches(runtime: Runtime) -> list[Patch]:
    """Those that one worker needs: none where replicas share no experts under any plan."""
    return patches_of() if runtime.job.own.shares_experts else []


def patches_of() -> list[Patch]:
    """All of them."""
    return [
        Patch(
            f"{MOE}.moe_layer:BaseMoELayer.__init__",
            wrap_layer,
            ("self", "config", "layer_number", "pg_collection"),
            "gives a layer its own experts, where others have another number of them",
        ),
        Patch(
            f"{MOE}.moe_layer:MoEAlltoAllTokenDispatcher",
            functools.partial(wrap_dispatcher, AllToAllInSlots),
            DISPATCHER,
            "sends tokens to experts in slots, where workers have unequal numbers of them",
        ),
        Patch(
            f"{MOE}.moe_layer:MoEAllGatherTokenDispatcher",
            functools.partial(wrap_dispatcher, AllGatherInSlots),
            DISPATCHER,
            "gathers tokens for experts in slots, where workers have unequal numbers of them",
        ),
        Patch(
            f"{MOE}.experts:SequentialMLP.sharded_state_dict",
            wrap_sharded_state_dict,
            ("self", "prefix", "sharded_offsets", "metadata"),
            "saves experts by their numbers among all of their layer",
        ),
        Patch(
            f"{MOE}.experts:TEGroupedMLP.sharded_state_dict",
            wrap_grouped_sharded_state_dict,
            ("self", "prefix", "sharded_offsets", "metadata"),
            "saves experts whose products are grouped by their numbers among all of their layer",
        ),
    ]


def own_experts(config: Any, group: Any) -> range | None:
    """The numbers of this worker's experts among all of a layer; None: all workers have as many, as Megatron has it.

    Args:
        config: Megatron's, of the model.
        group: of those that share the experts.
    """
    experts, sharers = config.num_moe_experts, group.size()
    return dealt_experts(experts, sharers)[group.rank()] if experts % sharers else None


def wrap_layer(original: Callable[..., None]) -> Callable[..., None]:
    """A layer's start. Megatron is told of a number of experts that it can share out, and corrected afterwards."""

    @functools.wraps(original)
    def __init__(
        self: Any, config: Any, layer_number: int | None = None, pg_collection: Any = None, **options: Any
    ) -> None:
        own = own_experts(config, pg_collection.ep)
        if own is None:
            original(self, config, layer_number, pg_collection, **options)
            return
        shared = copy.copy(config)
        shared.num_moe_experts = len(own) * pg_collection.ep.size()
        original(self, shared, layer_number, pg_collection, **options)
        self.config = config
        self.num_local_experts, self.local_expert_indices = len(own), list(own)

    return __init__


def wrap_dispatcher(in_slots: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """What a layer calls for its dispatcher. `in_slots`: takes the place of Megatron's where numbers are unequal."""

    def dispatcher(num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any) -> Any:
        if own_experts(config, pg_collection.ep) is None:
            return original(num_local_experts, local_expert_indices, config=config, pg_collection=pg_collection)
        return in_slots(config, pg_collection)

    return dispatcher


def wrap_sharded_state_dict(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Where checkpoints have a worker's experts: each is said as if it were a worker's only one, of as many workers as
    there are experts."""

    def alone(self: Any, place: int, group: StageGroup) -> SimpleNamespace:
        return SimpleNamespace(
            local_experts=[self.local_experts[place]], num_local_experts=1, ep_group=group, tp_group=self.tp_group,
            dp_group=self.dp_group,
        )  # fmt: skip

    def named(prefix: str, place: int, name: str) -> str:
        return f"{prefix}local_experts.{place}.{name.removeprefix(f'{prefix}local_experts.0.')}"

    return _one_by_one(original, alone, named)


def wrap_grouped_sharded_state_dict(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The same of experts whose products are grouped. There, a layer has the weights of all experts of a worker, and
    Megatron asks each such layer, too, for the places of its weights."""

    def alone(self: Any, place: int, group: StageGroup) -> SimpleNamespace:
        layers = {name: _of_one_expert(layer, place, group) for name, layer in self._modules.items()}
        return SimpleNamespace(
            _modules=layers, num_local_experts=1, config=self.config, ep_group=group, tp_group=self.tp_group
        )

    def named(prefix: str, place: int, name: str) -> str:
        return OF_ONE_EXPERT.sub(functools.partial(_at, place), name)

    return _one_by_one(original, alone, named)


def _one_by_one(
    original: Callable[..., dict[str, Any]],
    alone: Callable[[Any, int, StageGroup], SimpleNamespace],
    named: Callable[[str, int, str], str],
) -> Callable[..., dict[str, Any]]:
    """What asks for each expert by itself where numbers are unequal.

    Args:
        alone: a worker's experts and a place → these experts with none but the one there, in a group.
        named: a prefix, a place, and what that one's state is called → what it is called among that of all.
    """

    @functools.wraps(original)
    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        own = own_experts(self.config, self.ep_group)
        if own is None:
            return original(self, prefix, sharded_offsets, metadata)
        found: dict[str, Any] = {}
        for place, number in enumerate(own):
            one = alone(self, place, StageGroup(number, self.config.num_moe_experts))
            for name, entry in original(one, prefix, sharded_offsets, metadata).items():
                found[named(prefix, place, name)] = entry
        return found

    return sharded_state_dict


def _of_one_expert(layer: Any, place: int, group: StageGroup) -> Any:
    """A layer that shares all with this one, but has the weights of one expert only; others than those of grouped
    products as they are.

    Args:
        place: of the expert among the layer's own.
        group: its number among all, in place of the group of those that share experts.
    """
    if not hasattr(layer, "num_gemms"):
        return layer
    groups = copy.copy(layer._pg_collection)
    groups.ep = group
    named = {kind: layer._parameters.get(f"{kind}{place}") for kind in ("weight", "bias")}
    weights = {f"{kind}0": each for kind, each in named.items() if each is not None}
    alone = object.__new__(type(layer))
    vars(alone).update(vars(layer) | {"_parameters": weights, "num_gemms": 1, "_pg_collection": groups})
    return alone


def _at(place: int, found: re.Match[str]) -> str:
    """The name of an expert's state among that of all of a worker's."""
    layer, kind, _ = found.groups()
    return f"{layer}{kind}{place}" if kind else f"{layer}_extra_state{place or ''}"
