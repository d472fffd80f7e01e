# SPDX-License-Identifier: Apache-2.0
"""`resihp check` in this process, with what Megatron asks of a device answered as the stand-in would."""

from __future__ import annotations

import pytest
from megatron.training import arguments

from megatron_resihp import cpu


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Putting the stand-in in place would change torch for all tests."""
    monkeypatch.setattr(cpu, "_installed", True)
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 10)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (10, 0))
