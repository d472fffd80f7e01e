# SPDX-License-Identifier: Apache-2.0
"""Gradients summed between devices: all holders get the same bits, as if one had added them in the contributors' order.

Each worker is a thread here, and peers meet in queues without tags.
"""

from __future__ import annotations

import queue
import random
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import draw_case

from megatron_resihp.executor.direct import sums as module
from megatron_resihp.executor.direct.order import SliceSum, slice_sums
from megatron_resihp.executor.direct.peers import Parts
from megatron_resihp.executor.direct.sums import sum_between_devices
from megatron_resihp.plan.slices import Slice

TIMEOUT_S = 20.0
Wires = defaultdict[tuple[int, int], "queue.SimpleQueue[torch.Tensor]"]


class QueuedPeers:
    """What is received is there once it is waited for, as on a device."""

    def __init__(self, me: int, wires: Wires) -> None:
        self._me, self._wires = me, wires
        self.bytes_sent = 0

    def connect(self) -> None: ...

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def exchange(self, sends: Parts, receives: Parts) -> _Later:
        for tensor, worker in sends:
            self._wires[self._me, worker].put(tensor.clone())
            self.bytes_sent += tensor.nbytes
        return _Later([(tensor, self._wires[worker, self._me]) for tensor, worker in receives])


class _Later:
    def __init__(self, receives: list[tuple[torch.Tensor, queue.SimpleQueue[torch.Tensor]]]) -> None:
        self._receives = receives

    def wait(self) -> None:
        for tensor, wire in self._receives:
            tensor.copy_(wire.get(timeout=TIMEOUT_S))


def sum_all(sums: tuple[SliceSum, ...], gradients: dict[int, dict[Slice, torch.Tensor]]) -> dict[int, int]:
    """Sum in place; returns the bytes that each worker has sent."""
    wires: Wires = defaultdict(queue.SimpleQueue)
    peers = {worker: QueuedPeers(worker, wires) for worker in gradients}

    def run(worker: int) -> None:
        views = {piece: [("weight", tensor)] for piece, tensor in gradients[worker].items()}
        contributed = {piece for each in sums if worker in each.contributors for piece in each.slices}
        sum_between_devices(sums, views, contributed, peers[worker], worker)

    for worker in gradients:
        for other in gradients:
            _ = wires[worker, other]
    with ThreadPoolExecutor(len(gradients)) as threads:
        list(threads.map(run, gradients))
    return {worker: each.bytes_sent for worker, each in peers.items()}


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([100, 1 << 20]))
def test_all_holders_have_the_bits_of_one_sum(seed: int, load: int) -> None:
    source, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    plan = draw_case(source).plan
    plan = replace(plan, standbys={100: plan.shards_of(source.choice(plan.working))})
    sums = slice_sums(plan, plan.replicas[0].chunks[-1].end - 1)
    gradients = {
        worker: {
            piece: torch.randn(1 + piece.layer % 3 + 2, 3, generator=numbers)
            for each in sums if worker in each.holders for piece in each.slices
        }
        for worker in plan.members
    }  # fmt: skip
    expected = {
        piece: sum((gradients[worker][piece].clone() for worker in each.contributors[1:]),
                   gradients[each.contributors[0]][piece].clone())
        for each in sums for piece in each.slices
    }  # fmt: skip
    with patch.object(module, "LOAD", load):
        sum_all(sums, gradients)
    for of_worker in gradients.values():
        for piece, tensor in of_worker.items():
            assert torch.equal(tensor, expected[piece])


@pytest.mark.parametrize(
    ("holders", "contributors", "sent"),
    [
        ((0, 1, 2), (0, 1, 2), {0: 160, 1: 160, 2: 160}),  # 2 · (n - 1) / n of 120 bytes
        ((0, 1, 2), (1,), {0: 0, 1: 240, 2: 0}),
        ((0, 1, 2), (0, 1), {0: 180, 1: 180, 2: 0}),
    ],
    ids=["all count", "one counts", "one is a standby"],
)
def test_no_more_crosses_than_must(
    holders: tuple[int, ...], contributors: tuple[int, ...], sent: dict[int, int]
) -> None:
    piece = Slice(1, 0)
    gradients = {worker: {piece: torch.full((30,), float(worker))} for worker in holders}
    assert sum_all((SliceSum((piece,), holders, contributors),), gradients) == sent
    for of_worker in gradients.values():
        assert torch.equal(of_worker[piece], torch.full((30,), float(sum(contributors))))
