# SPDX-License-Identifier: Apache-2.0
"""Grouped sends and receives: by gloo between threads of this process, by NCCL on what stands for its group."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_resihp.executor.direct import peers as module
from megatron_resihp.executor.direct.peers import GlooPeers, NcclPeers
from megatron_resihp.executor.groups.communicators import Communicators
from megatron_resihp.executor.groups.waiting import Waiter

LIMIT_S = 20.0


def test_all_send_to_all_and_none_waits_for_another_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order each worker names its peers."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    store, workers = dist.HashStore(), (3, 5, 8)
    found: dict[tuple[int, int], float] = {}

    def run(me: int) -> None:
        group = GlooPeers(store, "peers", workers, me, Waiter(lambda: False))
        others = [worker for worker in workers if worker != me]
        rooms = {worker: torch.zeros(2) for worker in others}
        sends = [(torch.full((2,), float(10 * me + worker)), worker) for worker in others]
        group.exchange(sends, [(room, worker) for worker, room in reversed(rooms.items())]).wait()
        found.update({(worker, me): float(room[0]) for worker, room in rooms.items()})

    threads = [threading.Thread(target=run, args=(me,), daemon=True) for me in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == {(a, b): float(10 * a + b) for a in workers for b in workers if a != b}


class NcclGroup:
    """Notes what torch's group is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.asked.append(f"start on {device.type}")

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.asked.append(f"send to {rank}")

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.asked.append(f"receive from {rank}")

    def _end_coalescing(self, device: torch.device) -> Any:
        self.asked.append("end")
        return SimpleNamespace(wait=lambda: self.asked.append("wait"))


def test_a_batch_of_nccls_is_one_call_in_the_groups_own_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    group = NcclGroup()
    monkeypatch.setattr(module, "_nccl_group", lambda *_: group)
    peers = NcclPeers(dist.HashStore(), (4, 6, 9), 6, timedelta(seconds=LIMIT_S))
    pending = peers.exchange([(torch.ones(1), 4)], [(torch.ones(1), 9)])
    assert group.asked == ["start on cuda", "send to 0", "receive from 2", "end"]
    pending.wait()
    assert group.asked[-1] == "wait"


class StandbysGroup:
    """A group of devices that no world of torch's has."""

    group_name = "peers"

    def __init__(self) -> None:
        self.aborted = 0

    def _get_backend(self, device: torch.device) -> StandbysGroup:
        return self

    def abort(self) -> None:
        self.aborted += 1


def test_a_standbys_group_of_devices_is_aborted_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    group = StandbysGroup()
    table = dist.distributed_c10d._world.pg_map
    monkeypatch.setitem(table, group, ("nccl", None))  # type: ignore[arg-type]
    communicators = Communicators(dist.HashStore(), 0, lambda: True)
    communicators.connections.abort()
    assert group.aborted == 1
    communicators.destroy()
    assert not table
