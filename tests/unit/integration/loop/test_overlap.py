# SPDX-License-Identifier: Apache-2.0
"""What a broken epoch leaves on the streams beside the usual one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import utils
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_resihp.integration.loop.overlap import leave_overlap


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """For what streams the current one has been told to wait."""
    streams: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=streams.append))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    gc.collect()
    gc.disable()
    yield streams
    gc.enable()


def test_later_work_waits_and_what_nodes_hold_is_free(monkeypatch: pytest.MonkeyPatch, waited: list[Any]) -> None:
    """Megatron's node has run its forward pass, and will never run the backward pass."""
    stream = object()
    monkeypatch.setattr(utils, "_COMM_STREAM", stream)
    event: Any = SimpleNamespace(wait=lambda stream: None, record=lambda stream: None)
    node = utils.ScheduleNode(torch.neg, stream, event)
    node.forward(torch.ones(2, requires_grad=True))
    left = weakref.ref(node)
    del node
    assert left() is not None
    leave_overlap()
    assert left() is None and waited == [stream]


def test_later_work_waits_for_shared_experts(monkeypatch: pytest.MonkeyPatch, waited: list[Any]) -> None:
    """They add to gradients whose memory is about to be another's."""
    monkeypatch.setattr(utils, "_COMM_STREAM", None)
    monkeypatch.setattr(SharedExpertMLP, "stream", "theirs")
    leave_overlap()
    assert waited == ["theirs"]


def test_other_schedules_leave_nothing(monkeypatch: pytest.MonkeyPatch, waited: list[Any]) -> None:
    monkeypatch.setattr(utils, "_COMM_STREAM", None)
    leave_overlap()
    assert waited == []
