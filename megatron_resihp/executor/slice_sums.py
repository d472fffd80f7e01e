# SPDX-License-Identifier: Apache-2.0
"""Sums gradients over workers whose shards are cut differently. May import torch, `plan` and this package.

Slices with the same holders are summed by one group, in buckets (`plan.slices.in_buckets`). Some holders have no
gradient of a slice that counts: standbys, and all but one of the workers that hold a parameter whole. They add zeros
and get the sum, so that all holders have the same bits afterwards.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import reduce
from typing import Final

import torch

from megatron_resihp.executor.groups.side_group import MakeSideGroup, SideGroup
from megatron_resihp.executor.host_memory import HostMemory, OnHost, host_memory_of
from megatron_resihp.plan.slices import WHOLE, Slice, in_buckets

LOAD: Final = 64 << 20
"""The most bytes of gradients that are summed together: while they are, the next ones come from the device."""

SMALL: Final = 1 << 20
"""Bytes up to which gradients are copied by one kernel together: each one's own would take longer to begin."""

WIDE: Final = torch.complex128
"""A word of 16 bytes. A device copies rows with gaps element by element: the wider the element, the faster."""

Gradient = tuple[Sequence[torch.Tensor], bool]
"""This worker's copies of a gradient, and whether they count."""

Views = Mapping[Slice, Sequence[tuple[str, torch.Tensor]]]
"""Named gradients of each slice that this worker holds, sorted by name; views into its gradient buffers. A name may
stand twice where a worker holds a slice twice."""


@dataclass(frozen=True)
class Bucket:
    """Slices with the same holders, either cuts of one layer or what members hold whole.

    Attributes:
        group: of the holders; None if there is only one.
    """

    slices: tuple[Slice, ...]
    group: SideGroup | None

    @property
    def is_whole(self) -> bool:
        """Whether all members of a stage hold these slices whole."""
        return self.slices[0].cut == WHOLE


def make_buckets(holders: Mapping[Slice, tuple[int, ...]], worker: int, make_group: MakeSideGroup) -> list[Bucket]:
    """The buckets of a worker, in an order that agrees between workers.

    Args:
        holders: of every slice.
        make_group: (name, workers) → the group of these workers.
    """
    groups: dict[tuple[int, ...], SideGroup | None] = {(worker,): None}
    buckets = []
    for workers, slices in in_buckets(dict(holders)):
        if worker in workers:
            if workers not in groups:
                groups[workers] = make_group("slices/" + "-".join(map(str, workers)), workers)
            buckets.append(Bucket(slices, groups[workers]))
    return buckets


@torch.no_grad()
def sum_gradients(
    buckets: Sequence[Bucket], views: Views, contributed: Set[Slice], memory: HostMemory | None = None
) -> None:
    """Replace each gradient by its sum over all contributing workers; all holders call it once per iteration.

    Args:
        memory: for the way through the host; None: the process's own.
    """
    under_way: _Load | None = None
    for bucket in buckets:
        gradients = gradients_of(bucket.slices, views, contributed)
        if bucket.group is None:
            add_copies(gradients)
            continue
        for part in loads_of(gradients, LOAD):
            following = _Load(bucket.group, part, memory)
            if under_way is not None:
                under_way.sum()
            under_way = following
    if under_way is not None:
        under_way.sum()


class _Load:
    """Gradients on their way through the host."""

    def __init__(self, group: SideGroup, gradients: Sequence[Gradient], memory: HostMemory | None) -> None:
        self._group, self._gradients = group, gradients
        self._flat = pack(gradients)
        self._on_host: OnHost = (memory or host_memory_of(self._flat.device)).out(self._flat)

    def sum(self) -> None:
        self._group.sum(self._on_host.ready())
        self._on_host.back(self._flat)
        unpack(self._flat, [copies for copies, _ in self._gradients])


def gradients_of(slices: Sequence[Slice], views: Views, contributed: Set[Slice]) -> list[Gradient]:
    """The gradients of some slices; none of a slice without parameters, for any of its holders."""
    parts = [(_once_each(views[piece]), piece in contributed) for piece in slices]
    return [(copies, counts) for part, counts in parts for copies in part]


def add_copies(gradients: Sequence[Gradient]) -> None:
    """Give all copies of a gradient their sum, where only this worker holds it."""
    several = [(copies, counts) for copies, counts in gradients if len(copies) > 1]
    if several:
        unpack(pack(several), [copies for copies, _ in several])


def loads_of(gradients: Sequence[Gradient], most: int) -> Iterator[list[Gradient]]:
    """Gradients that travel together, cut where they are larger; the same on every holder."""
    load: list[Gradient] = []
    size = 0
    for copies, counts in gradients:
        shape = copies[0].shape
        longest = max(range(len(shape)), key=shape.__getitem__)
        rows = max(1, most * shape[longest] // max(copies[0].nbytes, 1))
        for part in zip(*(each.split(rows, longest) for each in copies), strict=True):
            if load and size + part[0].nbytes > most:
                yield load
                load, size = [], 0
            load.append((part, counts))
            size += part[0].nbytes
    if load:
        yield load


def pack(gradients: Sequence[Gradient]) -> torch.Tensor:
    """One flat tensor of gradients, read once: the sums of their copies, and zeros for those that don't count."""
    kind = reduce(torch.promote_types, (copies[0].dtype for copies, _ in gradients))
    size = sum(copies[0].numel() for copies, _ in gradients)
    flat = torch.empty(size, dtype=kind, device=gradients[0][0][0].device)
    places = _places(flat, [copies for copies, _ in gradients])
    counted = [(place, copies) for place, (copies, counts) in zip(places, gradients, strict=True) if counts]
    if len(counted) < len(places):
        torch._foreach_zero_([place for place, (_, counts) in zip(places, gradients, strict=True) if not counts])
    if counted:
        _copy([(place, copies[0]) for place, copies in counted])
    for place, copies in counted:
        for other in copies[1:]:
            place += other
    return flat


def unpack(flat: torch.Tensor, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
    """Copy a tensor that `pack` made back into all copies of each gradient."""
    _copy([(view, place) for place, copies in zip(_places(flat, gradients), gradients, strict=True) for view in copies])


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    small = list[tuple[torch.Tensor, torch.Tensor]]()
    for target, source in pairs:
        if _moves_in_wide_words(target, source):
            target.view(WIDE).copy_(source.view(WIDE))
        elif target.nbytes > SMALL:
            target.copy_(source)
        else:
            small.append((target, source))
    if small:
        torch._foreach_copy_([target for target, _ in small], [source for _, source in small])


def _moves_in_wide_words(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy between them has gaps, and can move words of 16 bytes all the same."""
    with_gaps = not (target.is_contiguous() and source.is_contiguous())
    return with_gaps and target.dtype == source.dtype and has_wide_rows(target) and has_wide_rows(source)


def has_wide_rows(tensor: torch.Tensor) -> bool:
    """Whether each row begins at a word of 16 bytes, and is whole words long without gaps."""
    words, rest = divmod(WIDE.itemsize, tensor.element_size())
    places = (tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1]) if tensor.dim() else (1,)
    return (
        rest == 0 and tensor.stride()[-1:] == (1,) and tensor.data_ptr() % WIDE.itemsize == 0
        and all(place % words == 0 for place in places)
    )  # fmt: skip


def _places(flat: torch.Tensor, gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    parts = flat.split([copies[0].numel() for copies in gradients])
    return [part.view(copies[0].shape) for part, copies in zip(parts, gradients, strict=True)]


def _once_each(named: Sequence[tuple[str, torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The copies of each name, names sorted."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, view in sorted(named, key=lambda each: each[0]):
        found.setdefault(name, []).append(view)
    return list(found.values())
