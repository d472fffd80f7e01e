"""A copy of another worker's part of the distributed optimizer, in host memory, that takes every step with its owner.

The owner sends the part's summed gradient before anybody agrees on the step, and both step with it: so whoever is left
of the two has the state of the last step that counts (DESIGN contract 3), and a fourth of what the state would take
crosses. May import megatron and this room.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_resihp.integration.optimizer_shards import MASTER, Entry, Part
from megatron_resihp.integration.runtime import parts_of
from megatron_resihp.plan.ranges import Range

LOAD = 64 << 20
"""Bytes of masters that are on the device at a time."""


@dataclass
class Cost:
    """What keeping copies has taken on this worker."""

    steps: int = 0
    bytes_sent: int = 0
    exchange_s: float = 0.0
    step_s: float = 0.0


@dataclass
class PartCopy:
    """The state of `owner`'s part.

    Attributes:
        counted: steps so far, where the optimizer counts them for each parameter group.
        gradient: of this iteration, once it has come, range by range in order.
    """

    owner: int
    part: Part
    counted: int | None = None
    gradient: torch.Tensor | None = None
    cost: Cost = field(default_factory=Cost)

    @property
    def elements(self) -> int:
        return sum(where.end - where.start for where in self.part)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for entry in self.part.values() for tensor in entry.tensors.values())

    def step(self, optimizer: Any, grad_norm: float, device: torch.device) -> None:
        """Take the owner's step.

        Args:
            optimizer: this worker's own, whose groups have the owner's learning rates, before its own step.
            grad_norm: that was agreed.
            device: where to compute, as the owner does, so that not a bit differs.
        """
        start = time.monotonic()
        assert self.gradient is not None, f"no gradient of worker {self.owner}'s part"
        sizes = [where.end - where.start for where in self.part]
        gradients = dict(zip(self.part, self.gradient.split(sizes), strict=True))
        counted = self.counted
        for index, own in enumerate(parts_of(optimizer)):
            mine = {where: entry for where, entry in self.part.items() if entry.place[0] == index}
            for load in _loads(mine):
                counted = _step(own, load, self.counted, gradients, grad_norm, device)
        self.gradient, self.counted = None, counted
        self.cost.steps += 1
        self.cost.step_s += time.monotonic() - start


def _loads(part: Part) -> Iterator[Part]:
    load: Part = {}
    size = 0
    for where, entry in part.items():
        if load and size + entry.tensors[MASTER].nbytes > LOAD:
            yield load
            load, size = {}, 0
        load[where] = entry
        size += entry.tensors[MASTER].nbytes
    if load:
        yield load


def _step(
    own: Any, load: Part, counted: int | None, gradients: dict[Range, torch.Tensor], grad_norm: float,
    device: torch.device,
) -> int | None:  # fmt: skip
    """By the owner's kind of optimizer; returns the new count."""
    inner, masters = _without_state(own.optimizer, counted), {}
    for where, entry in load.items():
        master = entry.tensors[MASTER].to(device)
        master.grad = gradients[where].to(device)
        masters[where] = master
        inner.param_groups[entry.place[1]]["params"].append(master)
        kept = {name: tensor.to(device) if tensor.dim() else tensor
                for name, tensor in entry.tensors.items() if name != MASTER}  # fmt: skip
        if kept:
            inner.state[master] = kept
    if own.config.clip_grad > 0.0:
        clip_grad_by_total_norm_fp32(list(masters.values()), own.config.clip_grad, grad_norm)
    inner.step()
    for where, entry in load.items():
        _keep(entry, {MASTER: masters[where], **inner.state[masters[where]]})
        masters[where].grad = None
    return max((group["step"] for group in inner.param_groups if group.get("step") is not None), default=None)


def _without_state(inner: Any, counted: int | None) -> Any:
    """An optimizer with the same settings in the same groups, and nothing to step."""
    twin = object.__new__(type(inner))
    vars(twin).update(vars(inner))
    twin.param_groups = []
    for group in inner.param_groups:
        settings = {name: value for name, value in group.items() if name not in ("params", "step")}
        # The owner's count: this worker's own optimizer stands still while it is a standby.
        twin.param_groups.append({**settings, **({} if counted is None else {"step": counted}), "params": []})
    twin.state = defaultdict(dict)
    return twin


def _keep(entry: Entry, stepped: dict[str, Any]) -> None:
    for name, value in stepped.items():
        if not isinstance(value, torch.Tensor):
            continue
        kept = entry.tensors.get(name)
        if kept is None:
            entry.tensors[name] = value.detach().cpu()
        elif kept.data_ptr() != value.data_ptr():
            kept.copy_(value)
