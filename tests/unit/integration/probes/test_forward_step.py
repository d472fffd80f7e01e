# SPDX-License-Identifier: Apache-2.0
"""What comes before each micro-batch's forward pass, whether it is measured or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.control.worker.errors import EpochBroken
from megatron_resihp.control.worker.heard import Heard
from megatron_resihp.integration.probes.patches import wrap_forward_step
from megatron_resihp.protocol.notices import EpochIsBroken


def test_a_worker_without_collectives_hears_of_a_death_between_micro_batches() -> None:
    """An iteration of many may take longer than the others wait for its report."""
    heard, run = Heard(0, lambda: None, 1), []
    runtime: Any = SimpleNamespace(control=SimpleNamespace(heard=heard), probes=SimpleNamespace(recording=False))
    step = wrap_forward_step(runtime, lambda *given, **_: run.append(given))
    step(None, None, None, 2, None, current_microbatch=0)
    heard.hear(EpochIsBroken(1, "worker 1 died", False))
    with pytest.raises(EpochBroken, match="worker 1 died"):
        step(None, None, None, 2, None, current_microbatch=1)
    assert len(run) == 1
