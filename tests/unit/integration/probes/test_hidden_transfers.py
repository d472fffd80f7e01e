# SPDX-License-Identifier: Apache-2.0
"""Transfers that are posted before an op and waited for after it: the op's time is none of theirs."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.integration.probes.patches import wrap_p2p_ops
from megatron_resihp.integration.probes.probe_clock import HostClock
from megatron_resihp.integration.probes.probes import Probes


class Clock(HostClock):
    """Moves where a test has something last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, immediate: bool = True) -> None:
        self.now = 100.0
        self.immediate = immediate
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def mark(self) -> float:  # type: ignore[override]
        return self.now

    def lasts(self, seconds: float) -> None:
        self.now += seconds


def transferred(clock: Clock, op_s: float, wait_s: float, pad: Any = None) -> tuple[float, float]:
    """When a receive was posted and done, as its record tells; `op_s`: of the op that is run before it is waited for, 0
    if none is."""
    sent: list[Any] = []
    probes = Probes(0, lambda: clock, lambda sheet: sent.append(sheet.record()))
    runtime: Any = SimpleNamespace(probes=probes, pads=SimpleNamespace(pad_transfer=pad))
    request = SimpleNamespace(wait=lambda: clock.lasts(wait_s))
    post = wrap_p2p_ops(runtime, lambda **_: {"recv_prev": request})
    probes.begin(0, 1, (0,), (0, 1))
    handles = post(
        tensor_send_prev=None, tensor_recv_prev=torch.empty(4), tensor_send_next=None, tensor_recv_next=None,
        group=None, prev_pipeline_rank=1, next_pipeline_rank=1,
    )  # fmt: skip
    if op_s:
        probes.ops.open_forward(0, 0, [])
        clock.lasts(op_s)
        probes.ops.close_forward(object(), [], None, None)
    handles["recv_prev"].wait()
    probes.synchronized()
    probes.finish()
    probes.flush()
    [row] = sent[0].transfers
    return float(row["posted"]), float(row["done"])


def test_a_transfer_that_an_op_has_hidden_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert math.isnan(transferred(Clock(monkeypatch), op_s=0.050, wait_s=0.00005)[1])


def test_nor_is_one_whose_wait_may_be_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert math.isnan(transferred(Clock(monkeypatch), op_s=0.050, wait_s=0.004)[1])


def test_one_that_lasts_longer_than_the_op_beside_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transferred(Clock(monkeypatch), op_s=0.050, wait_s=0.070) == pytest.approx((100.0, 100.12))


def test_one_that_is_waited_for_at_once_is_timed_however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transferred(Clock(monkeypatch), op_s=0.0, wait_s=0.00005) == pytest.approx((100.0, 100.00005))


def test_on_a_device_the_host_does_not_know_how_long_was_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert math.isnan(transferred(Clock(monkeypatch, immediate=False), op_s=0.050, wait_s=0.070)[1])
    assert transferred(Clock(monkeypatch, immediate=False), op_s=0.0, wait_s=0.070)[1] == pytest.approx(100.07)


def test_on_the_emulated_clock_it_lasts_as_long_as_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def pad(peer: int, came: float, size: float) -> float:
        clock.lasts(0.010)
        return 0.0

    assert transferred(clock, op_s=0.050, wait_s=0.0, pad=pad) == pytest.approx((100.05, 100.06))
