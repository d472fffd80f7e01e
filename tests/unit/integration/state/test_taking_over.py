# SPDX-License-Identifier: Apache-2.0
"""New objects in the memory of old ones: which chunks do, and that nothing of the old ones changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_objects import Chunk, trained

from megatron_resihp.integration.state.footprint import bytes_of, footprint_of, free_gradients, storages
from megatron_resihp.integration.state.taking_over import Succession, unchanged
from megatron_resihp.integration.trained import Trained
from megatron_resihp.plan import Shard


@pytest.fixture
def live() -> Trained:
    found: Trained = trained()
    chunk: Any = found.model[0]
    chunk.named_parameters = chunk.module.named_parameters
    free_gradients(found)
    return found


def build(succession: Succession, in_buffers: bool = False) -> Trained:
    """As Megatron does: a chunk, its gradients, an optimizer."""
    chunk: Any = Chunk()
    succession.parameters_of(chunk.module, in_buffers)
    succession.built(chunk)
    inner = torch.optim.Adam(chunk.module.parameters())
    new = Trained([chunk], SimpleNamespace(optimizer=inner, is_stub_optimizer=False), None)
    succession.optimizer_of(new)
    return new


def test_all_but_gradients_is_taken_over(live: Trained) -> None:
    before, parameter = bytes_of(live), live.model[0].module.weight
    values = parameter.detach().clone()
    succession = Succession(live, {0: 0})
    new = build(succession)
    old = storages(live)
    assert footprint_of(before, old, 0, storages(new)).new == 0
    succession.return_gradients()
    assert footprint_of(before, old, 0, storages(new)).most == before
    taken = new.model[0].module.weight
    assert taken is not parameter and torch.equal(taken, values) and torch.equal(parameter, values)
    state, was = new.optimizer.optimizer.state[taken], live.optimizer.optimizer.state[parameter]
    assert state is not was and all(state[name] is was[name] for name in was)


@pytest.mark.parametrize(("chunks", "in_buffers"), [({}, False), ({0: 0}, True)])
def test_other_chunks_have_memory_of_their_own(live: Trained, chunks: dict[int, int], in_buffers: bool) -> None:
    new = build(Succession(live, chunks), in_buffers)
    assert new.model[0].module.weight.data_ptr() != live.model[0].module.weight.data_ptr()
    assert not new.optimizer.optimizer.state


def test_parameters_of_other_types_are_not_taken_over(live: Trained) -> None:
    """Such as those of a model that was built in another precision."""
    live.model[0].module.double()
    new = build(Succession(live, {0: 0}))
    assert new.model[0].module.weight.dtype is torch.float32


def test_chunks_with_the_same_shard() -> None:
    first, second, third = Shard(0, 3, 0, 1), Shard(3, 6, 0, 1), Shard(0, 3, 0, 2)
    assert unchanged((first, second), (second, third)) == {0: 1}
    assert unchanged((), (first,)) == {}
