"""Moves shards between workers over a side group. May import torch, `plan` and this room.

At this stage a shard moves as a whole: whoever needs one lacks all of it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_resihp.executor.communicators import SideGroup
from megatron_resihp.plan import Coordinate, ParallelPlan


@dataclass(frozen=True)
class Transfer:
    """`source` sends the shard at `coordinate` to `target`."""

    source: int
    target: int
    coordinate: Coordinate


def plan_transfers(plan: ParallelPlan, held: Mapping[int, Coordinate | None]) -> list[Transfer]:
    """Who sends what to whom, spread over the living holders; the same list on every worker.

    Args:
        plan: the new plan.
        held: for every member the shard that it holds, current to the last applied step.
    """
    transfers = []
    for coordinate in plan.coordinates():
        sources = sorted(worker for worker, shard in held.items() if shard == coordinate)
        targets = [worker for worker in plan.workers_at(coordinate) if held.get(worker) != coordinate]
        transfers += [Transfer(sources[i % len(sources)], target, coordinate) for i, target in enumerate(targets)]
    return transfers


def send_tensors(group: SideGroup, target: int, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
    """Send named tensors and a JSON-able `extra`; the peer calls `receive_tensors`."""
    names = sorted(tensors)
    header = {
        "tensors": [_describe(name, tensors[name]) for name in names],
        "extra": extra,
    }
    encoded = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    group.send(torch.tensor([encoded.numel()]), target)
    group.send(encoded, target)
    for name in names:
        group.send(_as_bytes(tensors[name]), target)


def receive_tensors(group: SideGroup, source: int, device: torch.device) -> tuple[dict[str, torch.Tensor], Any]:
    """Receive what `send_tensors` sent; returns the tensors on `device` and the extra."""
    size = torch.zeros(1, dtype=torch.int64)
    group.receive(size, source)
    encoded = torch.empty(int(size), dtype=torch.uint8)
    group.receive(encoded, source)
    header = json.loads(encoded.numpy().tobytes())
    tensors = {}
    for name, shape, kind, on_host in header["tensors"]:
        tensor = torch.empty(shape, dtype=getattr(torch, kind))
        group.receive(_as_bytes(tensor), source)
        tensors[name] = tensor if on_host else tensor.to(device)
    return tensors, header["extra"]


def _describe(name: str, tensor: torch.Tensor) -> tuple[str, list[int], str, bool]:
    """Name, shape, type, and whether it lives on the host (step counters do even where all else is on a device)."""
    return name, list(tensor.shape), str(tensor.dtype).split(".")[1], tensor.device.type == "cpu"


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
