# SPDX-License-Identifier: Apache-2.0
"""Megatron's layers where those that share their experts have unequal numbers of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from grouped_layers import grouped_experts
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_resihp.integration.emergency.alone import world_of_one
from megatron_resihp.integration.patches.experts.uneven import (
    own_experts,
    wrap_dispatcher,
    wrap_grouped_sharded_state_dict,
    wrap_layer,
    wrap_sharded_state_dict,
)
from megatron_resihp.integration.world.heterogeneous_groups import StageGroup
from megatron_resihp.plan.experts import dealt_experts


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


@pytest.fixture
def alone() -> Iterator[Any]:
    """Megatron asks no group for its size unless torch's are there."""
    with world_of_one() as group:
        yield group


made = cache(grouped_experts)


def grouped(rank: int, sharers: int, gated: bool, biased: bool) -> Any:
    """One worker's experts of eight, as Megatron has them for --moe-grouped-gemm. All weights of an expert are its
    number."""
    given = TransformerConfig(
        num_layers=1, hidden_size=2, num_attention_heads=1, num_moe_experts=8, moe_ffn_hidden_size=3,
        gated_linear_unit=gated, add_bias_linear=biased, use_cpu_initialization=True, moe_grouped_gemm=True,
    )  # fmt: skip
    own, one = dealt_experts(8, sharers)[rank], StageGroup(0, 1)
    groups = SimpleNamespace(
        ep=StageGroup(rank, sharers), expt_tp=one, expt_dp=one, expt_gtp_remat=one, expt_dp_gtp_remat=one
    )
    experts = made()(len(own), given, pg_collection=groups)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            parameter.fill_(own[int(name[-1])])
    return experts


def saved(experts: Any, group: Any, wrap: Any) -> dict[str, Any]:
    """What Megatron is to save of them, by local name. `wrap`: its own function."""
    sharded_state_dict = wrap(type(experts).sharded_state_dict)
    found: dict[str, Any] = sharded_state_dict(experts, "mlp.experts.", ((0, 4, 6),), {"dp_cp_group": group})
    return found


def in_a_checkpoint(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What it has where, of what is said by local name."""
    built = dict(found)
    apply_factories(built)
    return [
        (each.key, each.global_shape, each.global_offset, each.replica_id,
         each.data.tolist() if isinstance(each, ShardedTensor) else None)
        for each in nested_values(built)
    ]  # fmt: skip


@pytest.mark.parametrize(("gated", "biased"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("sharers", [3, 5, 7])
def test_a_checkpoint_has_grouped_experts_where_megatron_looks_for_them(
    alone: Any, sharers: int, gated: bool, biased: bool
) -> None:
    """As of one worker with all experts, in whose checkpoint Megatron itself has said their places."""
    whole = in_a_checkpoint(saved(grouped(0, 1, gated, biased), alone, lambda megatrons: megatrons))
    build = partial(grouped, sharers=sharers, gated=gated, biased=biased)
    dealt = [saved(build(rank), alone, wrap_grouped_sharded_state_dict) for rank in range(sharers)]
    found = [entry for each in dealt for entry in in_a_checkpoint(each)]
    assert sorted(found) == sorted(whole)
    assert len(whole) == 8 * (2 * (2 + biased) + gated)


def test_grouped_experts_are_loaded_where_they_are(alone: Any) -> None:
    """Of what a checkpoint has for the last of three workers, its layers take all, without asking for more."""
    of_last, other = grouped(2, 3, True, False), grouped(2, 3, True, False)
    for parameter in of_last.parameters():
        parameter.data.zero_()
    loaded = {name: each.data for name, each in saved(other, alone, wrap_grouped_sharded_state_dict).items()}
    of_last.load_state_dict({name.removeprefix("mlp.experts."): each for name, each in loaded.items()}, strict=True)
    assert {name: each.unique().tolist() for name, each in of_last.named_parameters()} == {
        f"linear_fc{layer}.weight{place}": [number] for layer in (1, 2) for place, number in enumerate((6, 7))
    }
