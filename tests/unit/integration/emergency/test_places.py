# SPDX-License-Identifier: Apache-2.0
"""What other experts have beside tensors, told from a worker's own experts."""

from __future__ import annotations

from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_resihp.integration.emergency.places import objects_of_experts

STATE = "mlp.experts.experts.linear_fc1._extra_state"


def test_each_layer_has_them_once_for_each_other_expert() -> None:
    """Two layers of eight experts, of which this worker has two, and something that is no expert's."""
    own = [ShardedObject(STATE, [layer], (2, 8), (layer, expert)) for layer in range(2) for expert in (4, 5)]
    router = ShardedObject("mlp.router._extra_state", None, (2,), (0,))
    found = objects_of_experts([*own, router], [0, 7])
    assert [(each.global_offset, each.data) for each in found] == [
        ((layer, expert), [layer]) for layer in range(2) for expert in (0, 7)
    ]
    assert found[0].data is not own[0].data and {each.key for each in found} == {STATE}


def test_what_all_experts_of_a_layer_have_together_is_no_expert_s() -> None:
    own = [ShardedObject("1.mlp.experts.linear_fc1._extra_state", None, (2, 8), (1, expert)) for expert in (4, 5)]
    together = ShardedObject("1.mlp.experts.activation_func._extra_state", None, (2,), (1,))
    assert [each.global_offset for each in objects_of_experts([together, *own], [0])] == [(1, 0)]


def test_an_expert_that_is_saved_by_itself() -> None:
    own = [
        ShardedObject(f"1.mlp.experts.experts.{expert}.linear_fc1._extra_state", None, (1,), (0,)) for expert in (4, 5)
    ]
    [found] = objects_of_experts(own, [0])
    assert (found.key, found.global_offset) == ("1.mlp.experts.experts.0.linear_fc1._extra_state", (0,))
