# SPDX-License-Identifier: Apache-2.0
"""Megatron's layers where those that share their experts have unequal numbers of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron_resihp.integration.patches.experts.uneven import (
    own_experts,
    wrap_dispatcher,
    wrap_layer,
    wrap_sharded_state_dict,
)
from megatron_resihp.integration.world.heterogeneous_groups import StageGroup


def groups(rank: int, sharers: int) -> Any:
    return SimpleNamespace(ep=StageGroup(rank, sharers))


def config(experts: int = 8) -> Any:
    return SimpleNamespace(num_moe_experts=experts)


class Layer:
    """As Megatron's begins."""

    def __init__(self, config: Any, layer_number: int | None = None, pg_collection: Any = None, name: str = "") -> None:
        sharers, rank = pg_collection.ep.size(), pg_collection.ep.rank()
        assert config.num_moe_experts % sharers == 0
        self.config, self.layer_number, self.name = config, layer_number, name
        self.num_local_experts = config.num_moe_experts // sharers
        self.local_expert_indices = [rank * self.num_local_experts + place for place in range(self.num_local_experts)]
        assert all(each < config.num_moe_experts for each in self.local_expert_indices)


@pytest.mark.parametrize(
    ("experts", "sharers", "expected"),
    [(8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]), (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]), (4, 3, [[0, 1], [2], [3]])],
)
def test_a_layer_has_its_own_experts_and_knows_of_all(experts: int, sharers: int, expected: list[list[int]]) -> None:
    for rank in range(sharers):
        layer, given = Layer.__new__(Layer), config(experts)
        wrap_layer(Layer.__init__)(layer, config=given, layer_number=5, pg_collection=groups(rank, sharers), name="n")
        assert layer.local_expert_indices == expected[rank] and layer.num_local_experts == len(expected[rank])
        assert layer.config is given and given.num_moe_experts == experts
        assert (layer.layer_number, layer.name) == (5, "n")


def test_only_unequal_numbers_have_slots() -> None:
    def megatrons(*numbers: Any, config: Any, pg_collection: Any) -> str:
        return f"own {numbers}"

    made = wrap_dispatcher(lambda config, groups: "in slots", megatrons)
    assert made(2, [0, 1], config=config(), pg_collection=groups(0, 4)) == "own (2, [0, 1])"
    assert made(3, [0, 1, 2], config=config(), pg_collection=groups(0, 3)) == "in slots"


def sharded_state_dict(self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
    """As Megatron's: by local name, an expert's place among as many as there are."""
    total, first = self.ep_group.size() * self.num_local_experts, self.ep_group.rank() * self.num_local_experts
    return {
        f"{prefix}local_experts.{place}.{name}": (
            *sharded_offsets,
            first + place,
            total,
            expert,
            self.dp_group,
            metadata,
        )
        for place, expert in enumerate(self.local_experts)
        for name in ("linear_fc1.weight", "linear_fc2.weight")
    }


@pytest.mark.parametrize("sharers", [3, 4])
def test_a_checkpoint_has_each_expert_once_under_its_number(sharers: int) -> None:
    found: list[Any] = []
    for rank in range(sharers):
        own = own_experts(config(), StageGroup(rank, sharers)) or range(2 * rank, 2 * rank + 2)
        experts = SimpleNamespace(
            config=config(), ep_group=StageGroup(rank, sharers), tp_group="members", dp_group="holders",
            num_local_experts=len(own), local_experts=[f"expert {number}" for number in own],
        )  # fmt: skip
        said = wrap_sharded_state_dict(sharded_state_dict)(experts, "mlp.", ("layer",), metadata="said")
        names = [f"mlp.local_experts.{place}.linear_fc{n}.weight" for place in range(len(own)) for n in (1, 2)]
        assert list(said) == names, "names are those of this worker's own modules"
        found += said.values()
    assert found == [("layer", number, 8, f"expert {number}", "holders", "said") for number in range(8) for _ in (1, 2)]
