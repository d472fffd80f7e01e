# SPDX-License-Identifier: Apache-2.0
"""Sums gradients over workers whose shards are cut differently. May import torch, `plan` and this package.

Slices with the same holders make one bucket, which one group sums. Some holders have no gradient of a slice that
counts: standbys, and all but one of the workers that hold a parameter whole. They add zeros and get the sum, so that
all holders have the same bits afterwards.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import reduce

import torch

from megatron_resihp.executor.groups.side_group import MakeSideGroup, SideGroup
from megatron_resihp.plan.slices import Slice, in_buckets

Views = Mapping[Slice, Sequence[tuple[str, torch.Tensor]]]
"""Named gradients of each slice that this worker holds, sorted by name; views into its gradient buffers. A name may
stand twice where a worker holds a slice twice."""


@dataclass(frozen=True)
class Bucket:
    """Slices with the same holders. `group`: of these workers; None if there is only one."""

    slices: tuple[Slice, ...]
    group: SideGroup | None


def make_buckets(holders: Mapping[Slice, tuple[int, ...]], worker: int, make_group: MakeSideGroup) -> list[Bucket]:
    """The buckets of a worker, in an order that agrees between workers.

    Args:
        holders: of every slice.
        make_group: (name, workers) → the group of these workers.
    """
    buckets = []
    for workers, slices in in_buckets(dict(holders)):
        if worker in workers:
            name = "slices/" + "-".join(map(str, workers))
            buckets.append(Bucket(slices, make_group(name, workers) if len(workers) > 1 else None))
    return buckets


def sum_gradients(buckets: Sequence[Bucket], views: Views, contributed: Set[Slice]) -> None:
    """Replace each gradient by its sum over all contributing workers; all holders call it once per iteration."""
    for bucket in buckets:
        parts = [(_once_each(views[piece]), piece in contributed) for piece in bucket.slices]
        gradients = [(copies, counts) for part, counts in parts for copies in part]
        if not gradients:
            continue  # none of its slices has a parameter, for any of their holders
        if bucket.group is None and not any(len(copies) > 1 for copies, _ in gradients):
            continue
        flat = pack(gradients)
        if bucket.group is not None:
            host = flat.cpu()
            bucket.group.sum(host)
            flat = host.to(flat.device)
        unpack(flat, [copies for copies, _ in gradients])


def pack(gradients: Sequence[tuple[Sequence[torch.Tensor], bool]]) -> torch.Tensor:
    """One flat tensor of gradients, read once.

    Args:
        gradients: for each gradient, this worker's copies, which are added, and whether they count; if not, zeros are
            packed.
    """
    kind = reduce(torch.promote_types, (copies[0].dtype for copies, _ in gradients))
    size = sum(copies[0].numel() for copies, _ in gradients)
    flat = torch.empty(size, dtype=kind, device=gradients[0][0][0].device)
    places = _places(flat, [copies for copies, _ in gradients])
    counted = [(place, copies) for place, (copies, counts) in zip(places, gradients, strict=True) if counts]
    if len(counted) < len(places):
        torch._foreach_zero_([place for place, (_, counts) in zip(places, gradients, strict=True) if not counts])
    if counted:
        torch._foreach_copy_([place for place, _ in counted], [copies[0] for _, copies in counted])
    for place, copies in counted:
        for other in copies[1:]:
            place += other
    return flat


def unpack(flat: torch.Tensor, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
    """Copy a tensor that `pack` made back into all copies of each gradient."""
    pairs = [
        (view, place) for place, copies in zip(_places(flat, gradients), gradients, strict=True) for view in copies
    ]
    torch._foreach_copy_([view for view, _ in pairs], [place for _, place in pairs])


def _places(flat: torch.Tensor, gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    parts = flat.split([copies[0].numel() for copies in gradients])
    return [part.view(copies[0].shape) for part, copies in zip(parts, gradients, strict=True)]


def _once_each(named: Sequence[tuple[str, torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The copies of each name, names sorted."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, view in sorted(named, key=lambda each: each[0]):
        found.setdefault(name, []).append(view)
    return list(found.values())
