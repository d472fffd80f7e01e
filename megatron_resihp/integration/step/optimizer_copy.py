# SPDX-License-Identifier: Apache-2.0
"""A copy of another worker's part of the distributed optimizer, in host memory, that takes every step with its owner.

The owner sends the part's summed gradient before the step is agreed on, and both step with it, the copy in the
background: so the one that is left of the two has the state of the last step that counts, and a third of what masters
and moments take crosses. May import megatron, `executor`, `control.worker.behind` and this package.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_resihp.control.worker.behind import Behind
from megatron_resihp.executor.host_memory import HostMemory, host_memory_of
from megatron_resihp.integration.step.loss_scale import unscale
from megatron_resihp.integration.step.optimizer_shards import MASTER, Entry, Part, Place, Tensors
from megatron_resihp.integration.trained import parts_of
from megatron_resihp.plan import Coordinate, Shard

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
        self._steps = Behind("resihp-copy")
        self._due: Callable[[], None] | None = None
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

    def prepare_step(self, optimizer: Any, grad_norm: float, inverse: float | None, device: torch.device) -> None:
        """The owner takes a step; this copy takes it with `begin_step`, or before anything is read of it.

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
            with torch.no_grad(), self._beside_training(device):
                self._step(owners, gradient, grad_norm, inverse, device)
            self.cost.steps += 1
            self.cost.step_s += time.monotonic() - start

        if any(entry.place.matrix for entry in self._part.values()):
            # Muon sets the precision of the process's products of matrices while it multiplies. In the background it
            # would change what training computes, and the other way round.
            step()
        else:
            self._due = step

    def begin_step(self) -> None:
        """Take the step that was prepared, if it isn't taken yet, while training goes on."""
        if self._due is not None:
            self._steps.begin(self._due)
            self._due = None

    def _settle(self) -> None:
        """Wait until all steps are taken.

        Raises:
            what one of them has raised: the copy is of no use then.
        """
        self.begin_step()
        self._steps.settle()

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

    def _step(
        self, owners: Sequence[tuple[Any, float]], gradient: torch.Tensor, grad_norm: float,
        inverse: float | None, device: torch.device,
    ) -> None:  # fmt: skip
        if any(entry.place.optimizer >= len(owners) for entry in self._part.values()):
            # It would be left behind without a word.
            raise RuntimeError(f"worker {self.owner} has an optimizer for its part that this worker doesn't have")
        entries = list(zip(self._part.values(), gradient.split(self.sizes), strict=True))
        counted, memory = self._counted, self._memory or host_memory_of(device)
        for index, (inner, clip) in enumerate(owners):
            for load in _loads(each for each in entries if each[0].place.optimizer == index):
                twin = _without_state(inner, self._counted)
                masters = [stretch.put_in(twin, device, memory) for stretch in load]
                if inverse is not None:
                    scaled = [master.grad for master in masters if master.grad is not None]
                    unscale(scaled, torch.tensor([inverse], dtype=torch.float, device=device))
                if clip > 0.0:
                    clip_grad_by_total_norm_fp32(masters, clip, grad_norm)
                _pair_groups(twin)
                twin.step()
                for stretch, master in zip(load, masters, strict=True):
                    stretch.keep({MASTER: master, **twin.state[master]}, memory)
                    master.grad = None
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


@dataclass(frozen=True)
class _Stretch:
    """Elements of a range that are stepped at once.

    Attributes:
        entry: the range's.
        before: its tensors as they were before any of its elements were stepped.
        elements: which of the range's.
        gradient: theirs.
    """

    entry: Entry
    before: Tensors
    elements: slice
    gradient: torch.Tensor

    def put_in(self, inner: Any, device: torch.device, memory: HostMemory) -> torch.Tensor:
        """Give an optimizer without state these elements to step; returns their master."""
        place = self.entry.place
        on_device = {
            name: _formed(place, memory.on_device(tensor[self.elements], device)) if tensor.dim() else tensor.clone()
            for name, tensor in self.before.items()
        }
        master = on_device.pop(MASTER)
        master.grad = _formed(place, memory.on_device(self.gradient, device))
        inner.param_groups[place.group]["params"].append(master)
        if on_device:
            inner.state[master] = on_device
        return master

    def keep(self, stepped: dict[str, Any], memory: HostMemory) -> None:
        """Write the state after the step into host memory, if it isn't there already."""
        tensors = self.entry.tensors
        for name, value in stepped.items():
            if not isinstance(value, torch.Tensor):
                continue
            if not value.dim():
                tensors[name] = value.detach().cpu()
                continue
            if name not in tensors:
                tensors[name] = torch.empty(tensors[MASTER].shape, dtype=value.dtype)
            kept, value = tensors[name][self.elements], value.view(-1)
            if kept.data_ptr() != value.data_ptr():
                memory.keep(value, kept)


def _loads(entries: Iterable[tuple[Entry, torch.Tensor]]) -> Iterator[list[_Stretch]]:
    """Stretches of at most LOAD bytes of masters each, of ranges and their gradients; a matrix is never cut."""
    load: list[_Stretch] = []
    size = 0
    for entry, gradient in entries:
        for stretch in _stretches(entry, gradient):
            nbytes = stretch.gradient.numel() * entry.tensors[MASTER].element_size()
            if load and size + nbytes > LOAD:
                yield load
                load, size = [], 0
            load.append(stretch)
            size += nbytes
    if load:
        yield load


def _stretches(entry: Entry, gradient: torch.Tensor) -> Iterator[_Stretch]:
    master, before = entry.tensors[MASTER], dict(entry.tensors)
    # A range without elements is stepped, too: its scalars count.
    size = max(master.numel(), 1)
    length = LOAD // master.element_size() if entry.place.matrix is None else size
    for start in range(0, size, length):
        elements = slice(start, start + length)
        yield _Stretch(entry, before, elements, gradient[elements])


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


def _pair_groups(twin: Any) -> None:
    """Apex's FusedAdam looks at the first parameter of each group, and passes over those beyond its list of masters,
    which is as long as this worker's own group."""
    twin.param_groups = [group for group in twin.param_groups if group["params"]]
    if getattr(twin, "param_groups_master", None):
        twin.param_groups_master = [{"params": [None] * len(group["params"])} for group in twin.param_groups]
