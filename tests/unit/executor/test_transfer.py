# SPDX-License-Identifier: Apache-2.0
"""Named tensors on their way from one worker to another."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from late_copies import LateCopies

from megatron_resihp.executor import transfer
from megatron_resihp.executor.host_memory import HostMemory
from megatron_resihp.executor.transfer import receive_tensors, send_tensors


class Wire:
    """Both ends of a side group: what one sends the other receives, in order."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self.count = 0

    def send(self, tensor: torch.Tensor, worker: int) -> None:
        self.count += 1
        self.sent.put(tensor.clone())

    def receive(self, tensor: torch.Tensor, worker: int) -> None:
        tensor.copy_(self.sent.get_nowait())


STATE = {
    "weight": torch.randn(7, 3), "bf16": torch.randn(5).to(torch.bfloat16), "step": torch.tensor(4.0),
    "none": torch.empty(0, 3), "long": torch.arange(3), "flags": torch.tensor([True, False, True]),
    "strided": torch.randn(4, 6)[:, 2:4],
}  # fmt: skip


@pytest.mark.parametrize("parcel", [1, 40, 1 << 20])
def test_what_is_sent_arrives_bit_for_bit(monkeypatch: pytest.MonkeyPatch, parcel: int) -> None:
    monkeypatch.setattr(transfer, "PARCEL", parcel)
    wire: Any = Wire()
    send_tensors(wire, 1, STATE, {"steps": [None, 3]})
    tensors, extra = receive_tensors(wire, 0, torch.device("cpu"))
    assert extra == {"steps": [None, 3]}
    assert tensors.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)


@pytest.mark.parametrize("parcel", [1, 40, 1 << 20])
def test_a_devices_state_crosses_in_memory_that_is_used_again(monkeypatch: pytest.MonkeyPatch, parcel: int) -> None:
    monkeypatch.setattr(transfer, "PARCEL", parcel)
    wire: Any = Wire()
    leaving, coming = LateCopies(), LateCopies()
    sender, receiver = HostMemory(leaving), HostMemory(coming)
    taken = []
    for _ in range(3):
        send_tensors(wire, 1, STATE, {}, sender)
        tensors, _ = receive_tensors(wire, 0, torch.device("cpu"), receiver)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in STATE.items())
        taken.append(len(leaving.allocated) + len(coming.allocated))
    assert taken[0] == taken[-1]


def test_small_tensors_travel_together() -> None:
    wire: Any = Wire()
    send_tensors(wire, 1, {f"bias{i}": torch.randn(8) for i in range(100)}, {})
    assert wire.count == 3


def test_a_kept_tensor_keeps_only_itself() -> None:
    wire: Any = Wire()
    send_tensors(wire, 1, STATE, {})
    tensors, _ = receive_tensors(wire, 0, torch.device("cpu"))
    assert tensors["step"].untyped_storage().nbytes() == 4
