# SPDX-License-Identifier: Apache-2.0
"""Sums gradients of slices between devices. May import torch and this package.

Each contributor adds up a part of each load, in the order of the contributors, and gives it to all other holders. So a
part is added up once, and all holders have the same bits.
"""

from collections.abc import Sequence, Set

import torch

from megatron_resihp.executor.direct.order import SliceSum
from megatron_resihp.executor.direct.peers import Peers
from megatron_resihp.executor.slice_sums import LOAD, Views, add_copies, gradients_of, loads_of, pack, unpack
from megatron_resihp.plan.slices import Slice


def sum_between_devices(sums: Sequence[SliceSum], views: Views, contributed: Set[Slice], peers: Peers, me: int) -> None:
    """Replace each gradient by its sum over all contributing workers; all holders call it once per iteration.

    Args:
        sums: all of the plan's, in the agreed order.
        me: this worker.
    """
    for each in sums:
        if me not in each.holders:
            continue
        gradients = gradients_of(each.slices, views, contributed)
        if each.holders == (me,):
            add_copies(gradients)
            continue
        for load in loads_of(gradients, LOAD):
            flat = pack(load)
            _sum(flat, each, peers, me)
            unpack(flat, [copies for copies, _ in load])


def _sum(flat: torch.Tensor, of: SliceSum, peers: Peers, me: int) -> None:
    """Both rounds of one load."""
    parts = dict(zip(of.contributors, flat.tensor_split(len(of.contributors)), strict=True))
    own = parts.get(me)
    if of.collecting(me):
        assert own is not None
        theirs = {worker: peers.room(own.shape, own.dtype) for worker in of.collecting(me)}
        sends = [(parts[worker], worker) for worker in of.collecting(me)]
        _exchange(peers, sends, [(part, worker) for worker, part in theirs.items()])
        first, *others = (own.clone() if worker == me else theirs[worker] for worker in of.contributors)
        for other in others:
            first += other
        own.copy_(first)
    sends = [(own, worker) for worker in of.giving(me)] if own is not None else []
    _exchange(peers, sends, [(parts[worker], worker) for worker in of.giving(me) if worker in parts])


def _exchange(
    peers: Peers, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
) -> None:
    """Without empty parts, which neither end has anything of."""
    sends, receives = ([(part, worker) for part, worker in each if part.numel()] for each in (sends, receives))
    if sends or receives:
        peers.exchange(sends, receives).wait()
