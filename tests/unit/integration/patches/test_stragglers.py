# SPDX-License-Identifier: Apache-2.0
"""Megatron's search for stragglers: set up again for other ranks, and without a division by nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training import training

from megatron_resihp.integration.patches.stragglers import forget_ranks, wrap_report


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Megatron's own, on a device that is there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    yield training.stimer
    forget_ranks()


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def test_another_rank_takes_commands_on_the_same_port(detector: Any) -> None:
    port = free_port()
    detector.configure(4, 0, port=port, enabled=True)
    with detector:
        forget_ranks()  # in the middle of a forward pass
    socket.create_server(("", port)).close()
    assert not detector.start_gemm_ev[1:] and detector.start == detector.null_method
    detector.configure(2, 1, port=port, enabled=True)
    assert (detector.world, detector.rank, detector.start_gemm_ev) == (2, 1, [])
    assert detector.start == detector.start_method


def test_a_job_without_it_has_nothing_to_forget() -> None:
    before = dict(vars(training.stimer))
    forget_ranks()
    assert vars(training.stimer) == before


def test_what_is_logged_again_is_not_reported_and_whoever_measured_nothing_measures_now(detector: Any) -> None:
    asked: list[tuple[float, int]] = []

    def original(own: Any, flops: float, interval: int) -> bool:
        asked.append((flops, len(own.start_gemm_ev)))
        return True

    runtime: Any = SimpleNamespace(progress=SimpleNamespace(iteration=3), saves=SimpleNamespace(repeated=3))
    report = wrap_report(runtime, original)
    detector.configure(2, 1, enabled=True)
    report(detector, 5.0, 1)
    runtime.progress.iteration = 4
    report(detector, 5.0, 1)
    report(detector, 5.0, 1)
    assert asked == [(0.0, 0), (5.0, 1), (5.0, 1)]
