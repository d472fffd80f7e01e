# SPDX-License-Identifier: Apache-2.0
"""Counts of steps that an optimizer keeps for each parameter group, as Apex's Adam does: they move with the state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron_resihp.integration.state.shard import align_steps, group_steps
from megatron_resihp.integration.state.slice_state import HostFiller, _Filler
from megatron_resihp.integration.trained import Trained


def trained(*steps: int | None) -> Trained:
    """Objects whose optimizer has a group for each of these."""
    groups: list[dict[str, Any]] = [
        {"params": [torch.nn.Parameter(torch.zeros(2))], **({} if step is None else {"step": step})} for step in steps
    ]
    inner = SimpleNamespace(param_groups=groups, state={})
    return Trained([], SimpleNamespace(optimizer=inner, is_stub_optimizer=False), None)


def test_every_group_of_the_new_objects_gets_the_count() -> None:
    new = trained(None, None)
    _Filler(new).set_steps(group_steps(trained(7, 7, 7)))
    assert group_steps(new) == [7, 7]


def test_an_optimizer_that_counts_for_each_parameter_gets_none() -> None:
    new = trained(None, None)
    _Filler(new).set_steps(group_steps(trained(None)))
    assert group_steps(new) == [None, None]


def test_there_and_back_through_host_memory() -> None:
    host, back = HostFiller(), trained(None)
    host.set_steps(group_steps(trained(7, 7)))
    _Filler(back).set_steps(host.whole.steps)
    assert group_steps(back) == [7]


def test_groups_that_do_not_count_set_nobody_back() -> None:
    """Muon's group comes first, and keeps what the first of two changes has set."""
    between, after = trained(None, None), trained(None, None)
    _Filler(between).set_steps(group_steps(trained(None, 100)))
    between.optimizer.optimizer.param_groups[1]["step"] = 1000
    _Filler(after).set_steps(group_steps(between))
    assert group_steps(after) == [1000, 1000]


def test_an_optimizer_of_matrices_counts_none() -> None:
    """Megatron saves no state in which some groups count on and others don't."""
    new = trained(None)
    muon = SimpleNamespace(param_groups=[{"params": []}], state={}, scaled_orthogonalize_fn=len)
    new.optimizer = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer=muon, is_stub_optimizer=False), new.optimizer]
    )
    _Filler(new).set_steps([None, 7])
    assert group_steps(new) == [None, 7]


def test_what_is_saved_of_groups_is_the_same_on_every_worker() -> None:
    """Without the embedding and the head, a worker passes over their group, and may be the one that saves it."""
    middle = trained(100, 5000, None)
    for number in (0, 2):
        middle.optimizer.optimizer.param_groups[number]["params"].clear()
    align_steps(middle.optimizer)
    assert group_steps(middle) == [5000, 5000, 5000]


def test_an_optimizer_that_counts_for_each_parameter_saves_no_other_count() -> None:
    middle = trained(None, None)
    middle.optimizer.optimizer.param_groups[0]["params"].clear()
    align_steps(middle.optimizer)
    assert group_steps(middle) == [None, None]
