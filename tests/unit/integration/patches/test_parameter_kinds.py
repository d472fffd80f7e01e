# SPDX-License-Identifier: Apache-2.0
"""An optimizer built in a later epoch has a group for every kind of parameter of the whole model, as at the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig, ParamKey

from megatron_resihp.integration.patches.parameter_kinds import wrap_get_param_groups

OVERRIDES: Any = {ParamKey(name="*bias"): {"wd_mult": 0.0}, ParamKey(name="*table"): {"max_lr": 0.5}}
ELSEWHERE = [((("max_lr", 0.5),), False)]
"""The key of what only another worker has."""


class World:
    """Two workers, of which this is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(torch.distributed, "all_gather_object", self._gather)

    def _gather(self, object_list: list[Any], own: Any, group: Any = None) -> None:
        self.asked += 1
        object_list[:] = [own, ELSEWHERE]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


class Worker:
    """A worker whose optimizer Megatron builds."""

    def __init__(self, *working: int, joining: bool = False) -> None:
        self.runtime: Any = SimpleNamespace(held=SimpleNamespace(is_built=False), joining=joining)
        self.be_with(*working)
        self._wrapped = wrap_get_param_groups(self.runtime, megatron_optimizer._get_param_groups)

    def be_with(self, *working: int) -> None:
        self.runtime.view = SimpleNamespace(plan=SimpleNamespace(working=working))

    def finish_start(self) -> None:
        self.runtime.held.is_built = True
        self.runtime.joining = False

    def groups(self, **parameters: int) -> list[tuple[float, float, int]]:
        """What tells parameter groups apart, and how many parameters each has. `parameters`: names and sizes."""
        model = torch.nn.Module()
        for name, size in parameters.items():
            model.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))
        found = self._wrapped([model], OptimizerConfig(lr=0.1, min_lr=0.0), OVERRIDES)
        return [(group["max_lr"], group["wd_mult"], len(group["params"])) for group in found]


def test_kinds_that_only_others_have_keep_their_groups_without_asking_again(world: World) -> None:
    worker = Worker(0, 1)
    first = worker.groups(weight=2, bias=1)
    assert world.asked == 1 and (0.5, 1.0, 0) in first
    worker.finish_start()
    assert worker.groups(weight=2, bias=1) == first
    assert sorted(worker.groups(weight=2, table=3)) == sorted([(0.1, 1.0, 1), (0.1, 0.0, 0), (0.5, 1.0, 1)])
    assert world.asked == 1


def test_with_a_worker_that_was_started_anew_all_ask(world: World) -> None:
    worker = Worker(0, 1)
    worker.groups(weight=2)
    worker.finish_start()
    worker.be_with(0, 2)
    worker.groups(weight=2)
    assert world.asked == 2
    joining = Worker(0, 2, joining=True)
    joining.groups(weight=2)
    joining.finish_start()
    joining.groups(weight=2)
    assert world.asked == 4, "what it heard where it started was told by nobody else"


def test_a_kind_that_nobody_had_is_refused(world: World) -> None:
    worker = Worker(0, 1)
    worker.groups(weight=2)
    worker.finish_start()
    with pytest.raises(RuntimeError, match="of a kind that it did not have when the job began"):
        worker.groups(weight=2, bias=1)
