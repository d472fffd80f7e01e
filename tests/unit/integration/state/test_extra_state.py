# SPDX-License-Identifier: Apache-2.0
"""What modules keep beside parameters and buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.integration.state.extra_state import (
    ExtraState,
    bearers_of,
    collected,
    decoded,
    extra_digests,
    put_back,
)
from megatron_resihp.plan import Shard


class Keeping(torch.nn.Module):
    """A layer with a history, which counts how often it is asked for it."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept, self.asked = kept, 0

    def get_extra_state(self) -> Any:
        self.asked += 1
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def chunk(*layers: torch.nn.Module) -> torch.nn.Module:
    """As Megatron names them."""
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"linear_fc1": layer}) for layer in layers)
    wrapped = torch.nn.Module()
    wrapped.decoder = decoder
    found = torch.nn.Module()
    found.module = wrapped
    return found


def history(*numbers: float) -> dict[str, Any]:
    return {"history": torch.tensor(numbers), "recipe": object()}


def test_it_is_named_by_the_layer_wherever_that_is() -> None:
    whole, second = chunk(Keeping(history(1)), Keeping(history(2))), chunk(Keeping(history(2)))
    found = collected(bearers_of([whole], [Shard(0, 3, 0, 2)]))
    alone = collected(bearers_of([second], [Shard(2, 4, 1, 2)]))
    assert sorted(found) == [1, 2] and list(alone) == [2]
    assert extra_digests(found)["2/-2/1"] == extra_digests(alone)["2/-2/1"]


def test_new_modules_get_what_old_ones_had() -> None:
    old, new = chunk(Keeping({"history": torch.tensor([3.0]), "count": 5})), chunk(Keeping(None))
    shards = [Shard(1, 2, 0, 1)]
    found = collected(bearers_of([old], shards))
    put_back(bearers_of([new], shards), found)
    assert extra_digests(collected(bearers_of([new], shards))) == extra_digests(found)
    assert decoded(found[1]["linear_fc1"])["count"] == 5


def test_it_is_a_copy() -> None:
    module = Keeping(history(1))
    found = collected(bearers_of([chunk(module)], [Shard(1, 2, 0, 1)]))
    module.kept["history"].zero_()
    assert decoded(found[1]["linear_fc1"])["history"].item() == 1


@pytest.mark.parametrize("other", [history(1, 3), {"history": torch.tensor([1.0, 2.0]), "steps": 1}, {}])
def test_digests_tell_what_differs(other: dict[str, Any]) -> None:
    """Tensors and plain values: two recipes that are alike are not the same bytes."""

    def digest(kept: dict[str, Any]) -> dict[str, str]:
        return extra_digests(collected(bearers_of([chunk(Keeping(kept))], [Shard(1, 2, 0, 1)])))

    assert digest(history(1, 2)) == digest(history(1, 2)) != digest(other)


def test_who_keeps_nothing_is_not_asked_in_each_iteration() -> None:
    modules = [Keeping(None), Keeping(torch.empty(0)), Keeping(history(1))]
    model, shards, extra = [chunk(*modules)], [Shard(1, 4, 0, 1)], ExtraState()
    assert list(extra.collect(model, shards, after_forward=False)) == [3]
    modules[1].kept = torch.ones(1)
    assert sorted(extra.collect(model, shards)) == sorted(extra.collect(model, shards)) == [2, 3]
    assert [module.asked for module in modules] == [2, 3, 3]
    assert extra.layers(model, shards) == {1, 2, 3}


def test_a_new_epochs_modules_are_asked_anew() -> None:
    extra, shards = ExtraState(), [Shard(1, 2, 0, 1)]
    assert extra.collect([chunk(Keeping(None))], shards) == {}
    assert list(extra.collect([chunk(Keeping(history(1)))], shards)) == [1]


def test_transformer_engines_settings_are_no_state() -> None:
    """Of its recipes only delayed scaling has a history."""
    module = Keeping(torch.ones(3))
    module.fp8_meta = {"fp8_checkpoint": True, "scaling_fwd": SimpleNamespace(scale=1)}
    bearers = list(bearers_of([chunk(module)], [Shard(1, 2, 0, 1)]))
    assert collected(bearers) == {} and module.asked == 0
    module.fp8_meta["scaling_fwd"] = SimpleNamespace(amax_history=torch.ones(3))
    assert list(collected(bearers)) == [1]
