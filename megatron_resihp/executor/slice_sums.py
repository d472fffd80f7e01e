"""Sums gradients over workers whose shards are cut unlike each other. May import torch, `plan` and this room.

Slices with the same holders make one bucket, summed over one group of them. Who holds a slice but has no gradient of it
that counts (a standby; all but one of those who hold a parameter whole) adds zeros and gets the sum, so that all
holders have the same bits afterwards.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from megatron_resihp.executor.side_group import MakeSideGroup, SideGroup
from megatron_resihp.plan.slices import Slice, in_buckets

Views = Mapping[Slice, Sequence[tuple[str, torch.Tensor]]]
"""Named gradients of each slice that this worker holds, sorted by name; views into its gradient buffers. A name may
stand twice where a worker holds a slice twice."""


@dataclass(frozen=True)
class Bucket:
    """Slices that the same workers hold. `group`: of these workers; None if there is only one."""

    slices: tuple[Slice, ...]
    group: SideGroup | None


def make_buckets(
    holders: Mapping[Slice, tuple[int, ...]], worker: int, make_group: MakeSideGroup
) -> list[Bucket]:
    """The buckets that a worker has part in, in an order that agrees between workers.

    Args:
        holders: of every slice.
        make_group: (name, workers) → their group.
    """
    buckets = []
    for workers, slices in in_buckets(dict(holders)):
        if worker in workers:
            name = "slices/" + "-".join(map(str, workers))
            buckets.append(Bucket(slices, make_group(name, workers) if len(workers) > 1 else None))
    return buckets


def sum_gradients(buckets: Sequence[Bucket], views: Views, contributed: Set[Slice]) -> None:
    """Replace each gradient by its sum over all who contribute to it; all holders call it once per iteration."""
    for bucket in buckets:
        parts = [_once_each(views[piece]) for piece in bucket.slices]
        if not any(parts):
            continue  # none of its slices has a parameter, for any of their holders
        if bucket.group is None and not any(len(copies) > 1 for part in parts for copies in part):
            continue
        flat = torch.cat([
            _summed(copies, piece in contributed)
            for piece, part in zip(bucket.slices, parts, strict=True)
            for copies in part
        ])  # fmt: skip
        if bucket.group is not None:
            host = flat.cpu()
            bucket.group.sum(host)
            flat = host.to(flat.device)
        offset = 0
        for copies in (copies for part in parts for copies in part):
            size = copies[0].numel()
            for view in copies:
                view.copy_(flat[offset : offset + size].view(view.shape))
            offset += size


def _once_each(named: Sequence[tuple[str, torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The copies of each name, names sorted."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, view in sorted(named, key=lambda each: each[0]):
        found.setdefault(name, []).append(view)
    return list(found.values())


def _summed(copies: Sequence[torch.Tensor], counts: bool) -> torch.Tensor:
    if not counts:
        return torch.zeros(copies[0].numel(), dtype=copies[0].dtype, device=copies[0].device)
    total = copies[0].reshape(-1)
    for other in copies[1:]:
        total = total + other.reshape(-1)
    return total
