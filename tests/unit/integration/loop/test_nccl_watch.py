# SPDX-License-Identifier: Apache-2.0
"""NCCL in error, where nobody has died: the coordinator is asked for a recovery."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.integration.loop import nccl_watch
from megatron_resihp.protocol.messages import CommunicationFailed

ERROR = "NCCL group 7: COMM_ERROR"


@pytest.mark.parametrize(
    ("failure", "broken", "told"),
    ((None, False, []), (ERROR, False, [CommunicationFailed(1, 4, ERROR)]), (ERROR, True, [])),
    ids=("healthy", "failed", "known"),
)
def test_the_coordinator_is_told(
    monkeypatch: pytest.MonkeyPatch, failure: str | None, broken: bool, told: list[Any]
) -> None:
    said: list[Any] = []
    control: Any = SimpleNamespace(worker=1, epoch=4, heard=SimpleNamespace(broken=lambda: broken), tell=said.append)
    monkeypatch.setattr(nccl_watch, "group_error", lambda: failure)
    noted: list[str] = []
    nccl_watch.look(control, lambda: noted.append("failed"))
    assert said == told and len(noted) == len(told)
