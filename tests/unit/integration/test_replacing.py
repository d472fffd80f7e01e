# SPDX-License-Identifier: Apache-2.0
"""What Megatron's references see once other objects have taken the place of theirs."""

import pytest
import torch

from megatron_resihp.integration.replacing import become, take_apart


def test_every_reference_sees_the_new_object() -> None:
    old, new = torch.nn.Linear(2, 2), torch.nn.Conv1d(3, 4, 1)
    elsewhere = old
    become(old, new)
    assert isinstance(elsewhere, torch.nn.Conv1d) and elsewhere.weight is new.weight


def test_the_old_models_memory_goes_back_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch keeps of it for later, NCCL could not have."""
    held: list[int] = []
    module = torch.nn.Linear(2, 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.append(len(vars(module))))
    take_apart([module])
    assert held == [0]
