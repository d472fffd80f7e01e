# SPDX-License-Identifier: Apache-2.0
"""A copy of another worker's part of the distributed optimizer, in host memory, that takes every step with its owner.

The owner sends the part's summed gradient before the step is agreed on, and both step with it, the copy in the
background: so the one that is left of the two has the state of the last step that counts, and a third of what masters
and moments take crosses. May import megatron, `executor` and this package.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_resihp.executor.host_memory import HostMemory, host_memory_of
from megatron_resihp.integration.step.loss_scale import unscale
from megatron_resihp.integration.step.optimizer_shards import MASTER, Entry, Part, Place
from megatron_resihp.integration.trained import parts_of
from megatron_resihp.plan import Coordinate, Shard
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


class PartCopy:
    """The state of another worker's part.

    Args:
        owner: whose part it is.
        part: its state, in host memory.
        counted: steps so far, where the optimizer counts them for each parameter group.
        memory: through which the state goes to the device and back; None: the process's own.

    Attributes:
        gradient: of this iteration, once it has come, range by range in order.
        sizes: of ranges, in order.
    """

    def __init__(self, owner: int, part: Part, counted: int | None = None, memory: HostMemory | None = None) -> None:
        self.owner = owner
        self.gradient: torch.Tensor | None = None
        self.cost = Cost()
        self.sizes = [where.end - where.start for where in part]
        self.elements = sum(self.sizes)
        self._part = part
        self._counted = counted
        self._memory = memory
        self._stepping: threading.Thread | None = None
        self._error: Exception | None = None
        # One for all steps: torch keeps memory for each stream apart, and gives them out in turns of many.
        self._stream: Any = None

    @property
    def part(self) -> Part:
        """The state after all steps that have begun."""
        self._settle()
        return self._part

    @property
    def counted(self) -> int | None:
        self._settle()
        return self._counted

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for entry in self.part.values() for tensor in entry.tensors.values())

    def begin_step(self, optimizer: Any, grad_norm: float, inverse: float | None, device: torch.device) -> None:
        """Take the owner's step, in the background unless it is one of matrices.

        Args:
            optimizer: this worker's own, whose groups have the owner's learning rates, before its own step.
            grad_norm: that was agreed.
            inverse: what the gradient is to be multiplied by first; None: by nothing.
            device: where to compute, as the owner does, so that not a bit differs.
        """
        self._settle()
        gradient, self.gradient = self.gradient, None
        assert gradient is not None, f"no gradient of worker {self.owner}'s part"
        # What the groups say now: the next step may have another learning rate.
        owners = [(_without_state(own.optimizer, self._counted), own.config.clip_grad) for own in parts_of(optimizer)]

        def step() -> None:
            start = time.monotonic()
            try:
                with torch.no_grad(), self._beside_training(device):
                    self._step(owners, gradient, grad_norm, inverse, device)
            except Exception as error:
                self._error = error
            self.cost.steps += 1
            self.cost.step_s += time.monotonic() - start

        if any(entry.place.matrix for entry in self._part.values()):
            # Muon sets the precision of the process's products of matrices while it multiplies. In the background it
            # would change what training computes, and the other way round.
            step()
            return
        self._stepping = threading.Thread(target=step, name="resihp-copy", daemon=True)
        self._stepping.start()

    @contextmanager
    def _beside_training(self, device: torch.device) -> Iterator[None]:
        """On a stream of its own, in this thread."""
        if device.type != "cuda":
            yield
            return
        torch.cuda.set_device(device)
        self._stream = self._stream or torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _settle(self) -> None:
        """Wait for the step that is being taken.

        Raises:
            what it has raised: the copy is of no use then.
        """
        if self._stepping is not None:
            self._stepping.join()
            self._stepping = None
        if self._error is not None:
            raise self._error

    def _step(
        self, owners: Sequence[tuple[Any, float]], gradient: torch.Tensor, grad_norm: float,
        inverse: float | None, device: torch.device,
    ) -> None:  # fmt: skip
        if any(entry.place.optimizer >= len(owners) for entry in self._part.values()):
            # It would be left behind without a word.
            raise RuntimeError(f"worker {self.owner} has an optimizer for its part that this worker doesn't have")
        gradients = dict(zip(self._part, gradient.split(self.sizes), strict=True))
        counted, memory = self._counted, self._memory or host_memory_of(device)
        for index, (inner, clip) in enumerate(owners):
            mine = {where: entry for where, entry in self._part.items() if entry.place.optimizer == index}
            for load in _loads(mine):
                twin = _without_state(inner, self._counted)
                masters = _put_in(twin, load, gradients, device, memory)
                if inverse is not None:
                    scaled = [master.grad for master in masters.values() if master.grad is not None]
                    unscale(scaled, torch.tensor([inverse], dtype=torch.float, device=device))
                if clip > 0.0:
                    clip_grad_by_total_norm_fp32(list(masters.values()), clip, grad_norm)
                twin.step()
                for where, entry in load.items():
                    _keep(entry, {MASTER: masters[where], **twin.state[masters[where]]}, memory)
                    masters[where].grad = None
                counted = max((each for each in (counted, _counted(twin)) if each is not None), default=None)
        self._counted = counted


@dataclass
class Kept:
    """What of the optimizer's state is current on this worker, since the last *go*.

    Attributes:
        coordinate: of which shard.
        owns: whether the training objects' own part is.
        copy: of another worker's part.
        copied: what that worker holds.
    """

    coordinate: Coordinate
    owns: bool
    copy: PartCopy | None
    copied: tuple[Shard, ...] = ()


@dataclass
class ExpertCopy:
    """A copy of another worker's experts, of an optimizer that isn't shared out, and current since the last *go*.

    Attributes:
        copied: what that worker holds.
        copy: whole parameters, by names of `lasting_names`.
    """

    copied: tuple[Shard, ...]
    copy: PartCopy


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


def _put_in(
    inner: Any, load: Part, gradients: Mapping[Range, torch.Tensor], device: torch.device, memory: HostMemory
) -> dict[Range, torch.Tensor]:
    """Give an optimizer without state a load to step; returns its masters."""
    masters = {}
    for where, entry in load.items():
        masters[where] = master = _formed(entry.place, memory.on_device(entry.tensors[MASTER], device))
        master.grad = _formed(entry.place, memory.on_device(gradients[where], device))
        inner.param_groups[entry.place.group]["params"].append(master)
        kept = {name: _formed(entry.place, memory.on_device(tensor, device)) if tensor.dim() else tensor
                for name, tensor in entry.tensors.items() if name != MASTER}  # fmt: skip
        if kept:
            inner.state[master] = kept
    return masters


def _formed(place: Place, flat: torch.Tensor) -> torch.Tensor:
    return flat if place.matrix is None else place.matrix.of(flat)


def _counted(inner: Any) -> int | None:
    counts = [group["step"] for group in inner.param_groups if group["params"] and group.get("step") is not None]
    return max(counts, default=None)


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


def _keep(entry: Entry, stepped: dict[str, Any], memory: HostMemory) -> None:
    for name, value in stepped.items():
        if not isinstance(value, torch.Tensor):
            continue
        value = value.view(-1) if value.dim() else value
        kept = entry.tensors.get(name)
        if kept is None:
            entry.tensors[name] = value.detach().cpu()
        elif kept.data_ptr() != value.data_ptr():
            memory.keep(value, kept)
