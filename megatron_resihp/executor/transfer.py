# SPDX-License-Identifier: Apache-2.0
"""Moves shards between workers over a side group. May import torch, `plan` and this package.

Here a shard moves as a whole: a worker that needs a shard has no part of it.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from megatron_resihp.executor.groups.side_group import SideGroup
from megatron_resihp.executor.host_memory import HostMemory, Moment, host_memory_of
from megatron_resihp.plan import Coordinate, ParallelPlan

PARCEL: Final = 64 << 20
"""The most bytes that travel together, unless one tensor is larger."""
ALIGNMENT: Final = 8


@dataclass(frozen=True)
class Transfer:
    """`source` sends the shard at `coordinate` to `target`."""

    source: int
    target: int
    coordinate: Coordinate


def plan_transfers(plan: ParallelPlan, held: Mapping[int, Coordinate | None]) -> list[Transfer]:
    """All transfers for a plan, spread over the living holders; the same list on every worker.

    Args:
        plan: the new plan.
        held: the shard that each member holds, current to the last applied step.
    """
    transfers = []
    for coordinate in plan.grid.coordinates():
        sources = sorted(worker for worker, shard in held.items() if shard == coordinate)
        targets = [worker for worker in plan.grid.workers_at(coordinate) if held.get(worker) != coordinate]
        transfers += [Transfer(sources[i % len(sources)], target, coordinate) for i, target in enumerate(targets)]
    return transfers


def send_tensors(
    group: SideGroup, target: int, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any],
    memory: HostMemory | None = None,
) -> None:  # fmt: skip
    """Send named tensors and a JSON-able `extra`; the peer calls `receive_tensors`.

    Args:
        memory: for the way through the host; None: the process's own.
    """
    names = sorted(tensors)
    header = {
        "tensors": [_describe(name, tensors[name]) for name in names],
        "extra": extra,
    }
    encoded = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    group.send(torch.tensor([encoded.numel()]), target)
    group.send(encoded, target)
    under_way: _Parcel | None = None
    for load in _loads([_padded(tensors[name].nbytes) for name in names]):
        if under_way is not None and _is_alone(load):
            under_way.send(group, target)
            under_way = None
        if _is_alone(load):
            group.send(_as_bytes(tensors[names[load[0][0]]]), target)
            continue
        following = _Parcel([(tensors[names[index]], size) for index, size in load], memory)
        if under_way is not None:
            under_way.send(group, target)
        under_way = following
    if under_way is not None:
        under_way.send(group, target)


class _Parcel:
    """Tensors on their way into one piece of host memory, each with its size in bytes there."""

    def __init__(self, load: Sequence[tuple[torch.Tensor, int]], memory: HostMemory | None) -> None:
        self._memory = memory or _memory_for([tensor for tensor, _ in load])
        self._content = self._memory.room(sum(size for _, size in load), torch.uint8)
        places = self._content.split([size for _, size in load])
        self._copies = [self._begin(tensor.detach(), place) for (tensor, _), place in zip(load, places, strict=True)]

    def _begin(self, tensor: torch.Tensor, place: torch.Tensor) -> Moment | None:
        view = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return self._memory.copy_out(tensor, view)

    def send(self, group: SideGroup, target: int) -> None:
        for copy in self._copies:
            if copy is not None:
                copy.synchronize()
        group.send(self._content, target)
        self._memory.free(self._content)


def receive_tensors(
    group: SideGroup, source: int, device: torch.device, memory: HostMemory | None = None
) -> tuple[dict[str, torch.Tensor], Any]:
    """Receive the tensors of a `send_tensors` call; returns them on `device`, with the extra."""
    size = torch.zeros(1, dtype=torch.int64)
    group.receive(size, source)
    encoded = torch.empty(int(size), dtype=torch.uint8)
    group.receive(encoded, source)
    header = json.loads(encoded.numpy().tobytes())
    described = header["tensors"]
    tensors = {}
    memory = memory or host_memory_of(device)
    for load in _loads([_padded(_bytes_of(shape, kind)) for _, shape, kind, _ in described]):
        if _is_alone(load):
            name, shape, kind, on_host = described[load[0][0]]
            tensors[name] = torch.empty(shape, dtype=getattr(torch, kind), device="cpu" if on_host else device)
            group.receive(_as_bytes(tensors[name]), source)
            continue
        parcel = memory.room(sum(size for _, size in load), torch.uint8)
        group.receive(parcel, source)
        last: Moment | None = None
        for content, (index, _) in zip(parcel.split([size for _, size in load]), load, strict=True):
            name, shape, kind, on_host = described[index]
            view = content[: _bytes_of(shape, kind)].view(getattr(torch, kind)).view(shape)
            # A copy, so that a tensor does not keep the whole parcel alive.
            if on_host:
                tensors[name] = view.clone()
            else:
                tensors[name] = torch.empty(shape, dtype=view.dtype, device=device)
                last = memory.copy_back(view, tensors[name])
        memory.free(parcel, last)
    return tensors, header["extra"]


def tell_all(group: SideGroup, worker: int, content: Any) -> dict[int, Any]:
    """Gather JSON-able `content` from each member of a group; all members call it, each with its own id (`worker`)."""
    encoded = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    place = group.workers.index(worker)
    sizes = torch.zeros(len(group.workers), dtype=torch.int64)
    sizes[place] = encoded.numel()
    group.sum(sizes)
    said = list(torch.zeros(int(sizes.sum()), dtype=torch.uint8).split(sizes.tolist()))
    said[place].copy_(encoded)
    together = torch.cat(said)
    group.sum(together)
    parts = together.split(sizes.tolist())
    return {each: json.loads(part.numpy().tobytes()) for each, part in zip(group.workers, parts, strict=True)}


def _loads(sizes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Group tensors, as (index, size in bytes), that travel together: sending small ones one by one is slow."""
    load: list[tuple[int, int]] = []
    for index, size in enumerate(sizes):
        if load and sum(each for _, each in load) + size > PARCEL:
            yield load
            load = []
        load.append((index, size))
    if load:
        yield load


def _is_alone(load: Sequence[tuple[int, int]]) -> bool:
    """Whether a load is a tensor so large that the group sends it part by part."""
    return sum(size for _, size in load) > PARCEL


def _padded(size: int) -> int:
    """A size in bytes, rounded up so that a tensor of any type can follow."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes_of(shape: Sequence[int], kind: str) -> int:
    return math.prod(shape) * getattr(torch, kind).itemsize


def _describe(name: str, tensor: torch.Tensor) -> tuple[str, list[int], str, bool]:
    """Name, shape, type, and whether the tensor is on the host (step counters always are)."""
    return name, list(tensor.shape), str(tensor.dtype).split(".")[1], tensor.device.type == "cpu"


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _memory_for(tensors: Sequence[torch.Tensor]) -> HostMemory:
    """For the way of these tensors to the host; counters of steps are there among others of the device."""
    return host_memory_of(next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu")))
