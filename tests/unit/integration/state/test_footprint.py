# SPDX-License-Identifier: Apache-2.0
"""What old and new training objects take together, and gradients that make room for the new ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from small_objects import BYTES, NUMBERS, trained

from megatron_resihp.integration.state.footprint import (
    bring_gradients_back,
    bytes_of,
    footprint_of,
    free_gradients,
    storages,
)
from megatron_resihp.integration.step.step import take_step
from megatron_resihp.integration.trained import Trained


@pytest.fixture
def live() -> Trained:
    return trained()


def test_gradients_make_room(live: Trained) -> None:
    whole = bytes_of(live)
    assert 4 * BYTES <= whole < 4 * BYTES + 16  # the parameters, their gradients, two moments, and a count of steps
    before = live.model[0].module.weight.detach().clone()
    for _ in range(2):  # a rebuild may be begun again
        free_gradients(live)
        assert sum(storages(live).values()) == whole - BYTES
        assert bytes_of(live) == whole
    assert torch.equal(live.model[0].module.weight, before)


def test_objects_that_go_on_being_used_have_gradients_again(live: Trained) -> None:
    """A standby's, after a rebuild in which it would have worked was given up."""
    whole = bytes_of(live)
    free_gradients(live)
    bring_gradients_back(live)
    assert sum(storages(live).values()) == whole and not live.lacks_gradients
    assert torch.equal(live.model[0].module.weight.main_grad, torch.zeros(1, NUMBERS))


def test_gradients_that_are_there_are_left_alone(live: Trained) -> None:
    bring_gradients_back(live)
    assert torch.equal(live.model[0].buffers[0].grad_data, torch.ones(NUMBERS))


def test_no_step_is_taken_without_gradients(live: Trained) -> None:
    free_gradients(live)
    with pytest.raises(RuntimeError, match="whose gradients were freed"):
        take_step(SimpleNamespace(held=SimpleNamespace(live=live)), SimpleNamespace(skipped=False))  # type: ignore[arg-type]


def test_what_is_taken_over_counts_once(live: Trained) -> None:
    before, new = bytes_of(live), trained()
    new.optimizer.optimizer.state = live.optimizer.optimizer.state
    free_gradients(live)
    found = footprint_of(before, storages(live), 0, storages(new))
    assert found.before == before and found.new == 2 * BYTES  # parameters and gradients; moments are the old ones
    assert found.most == before - BYTES + 2 * BYTES
