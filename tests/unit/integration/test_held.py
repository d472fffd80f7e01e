# SPDX-License-Identifier: Apache-2.0
"""What a worker holds beside its own training objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_resihp.integration.held import Held
from megatron_resihp.integration.step.optimizer_copy import ExpertCopy, PartCopy
from megatron_resihp.plan import Shard


@pytest.mark.parametrize("fails", [True, False])
def test_a_copy_that_could_not_take_a_step_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """An emergency save goes on without it."""
    copy, held = PartCopy(3, {}), Held(None)  # type: ignore[arg-type]
    copy.gradient = torch.empty(0)

    def step(*_: Any) -> None:
        if fails:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(copy, "_step", step)
    monkeypatch.setattr("megatron_resihp.integration.step.optimizer_copy.parts_of", lambda optimizer: ())
    copy.prepare_step(None, 1.0, None, torch.device("cpu"))
    held.experts = ExpertCopy((Shard(0, 1, 0, 1, 1, 2),), copy)
    held.drop_failed_copy()
    assert (held.experts is None) is fails and (held.copied == ()) is fails
    assert ("the copy of worker 3's experts is lost: out of memory" in capsys.readouterr().err) is fails
