# SPDX-License-Identifier: Apache-2.0
"""Host memory for what crosses between a device and gloo: pinned, used again and again, copied on streams of its own.

A copy to or from pageable memory holds up the host and goes through a small buffer of the driver's. Pinned memory can't
be swapped, so there must not be too much of it: where the host gives no more, pageable memory is slower and does as
well, and what an epoch has used is given back before the next one. May import torch and `groups.errors`.
"""

import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from megatron_resihp.executor.groups.errors import is_out_of_memory


class Moment(Protocol):
    """When a copy is over, as torch.cuda.Event."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class Copies(Protocol):
    """A device's copies to and from host memory."""

    def allocate(self, size: int) -> torch.Tensor:
        """So many bytes of host memory."""
        ...

    def give_back(self) -> None:
        """Let the system have the host memory that is out of use."""
        ...

    def out(self, source: torch.Tensor, target: torch.Tensor) -> Moment:
        """Begin to copy to the host what the device's work so far leaves in `source`."""
        ...

    def back(self, source: torch.Tensor, target: torch.Tensor) -> Moment:
        """Begin to copy to the device; its later work waits for the copy."""
        ...


class CudaCopies:
    """Copies on two streams, one for each direction, so that neither waits for the other."""

    def __init__(self) -> None:
        self._out, self._back = torch.cuda.Stream(), torch.cuda.Stream()
        self._told = False

    def allocate(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if not self._told:
                print(f"resihp: no more pinned memory for {size >> 20} MiB, so copies are slower", file=sys.stderr)
            self._told = True
            return torch.empty(size, dtype=torch.uint8)

    def give_back(self) -> None:
        torch._C._host_emptyCache()

    def out(self, source: torch.Tensor, target: torch.Tensor) -> Moment:
        return _copy_on(self._out, source, target, on_device=source)

    def back(self, source: torch.Tensor, target: torch.Tensor) -> Moment:
        moment = _copy_on(self._back, source, target, on_device=target)
        torch.cuda.current_stream().wait_event(moment)
        return moment


def _copy_on(stream: Any, source: torch.Tensor, target: torch.Tensor, on_device: torch.Tensor) -> Any:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    if on_device.is_cuda:  # counters of steps among what moves are not
        on_device.record_stream(stream)  # an error may let go of the tensor before the copy is over
    return stream.record_event()


PIECE: Final = 64 << 20
"""Bytes that go at once through pinned memory to memory that is not."""


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return tensor.view(-1).split(max(1, PIECE // tensor.element_size()))


class HostMemory:
    """The host memory through which a device's tensors cross. It may be used by several threads.

    Buffers have sizes that are powers of two, and are kept for an epoch: an iteration needs what the one before it
    needed, and no more of them are made than are in use at once.

    Args:
        copies: of the device; None: its tensors are in host memory, and nothing has to be copied.
    """

    def __init__(self, copies: Copies | None) -> None:
        self._copies = copies
        self._free: dict[int, list[tuple[torch.Tensor, Moment | None]]] = {}
        self._lock = threading.Lock()

    def room(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory of one dimension, for one use; `free` takes it back."""
        size = elements * dtype.itemsize
        if self._copies is None:
            return torch.empty(elements, dtype=dtype)
        rounded = 1 << max(size - 1, 0).bit_length()
        return self._take(self._copies, rounded)[:size].view(dtype)

    def _take(self, copies: Copies, size: int) -> torch.Tensor:
        with self._lock:
            free = self._free.get(size, [])
            for index, (buffer, last_use) in enumerate(free):
                if last_use is None or last_use.query():
                    del free[index]
                    return buffer
        return copies.allocate(size)

    def free(self, host: torch.Tensor, last_use: Moment | None = None) -> None:
        """Take memory that `room` gave back. `last_use`: when it is over; None: it is."""
        if self._copies is not None:
            buffer = torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage())
            with self._lock:
                self._free.setdefault(buffer.numel(), []).append((buffer, last_use))

    def give_back(self) -> None:
        """An epoch is over, and another plan needs other sizes. torch keeps a buffer until its last copy is over."""
        if self._copies is not None:
            with self._lock:
                self._free.clear()
            self._copies.give_back()

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> Moment | None:
        """Begin to copy to the host; None: it is done."""
        if self._copies is None:
            target.copy_(source)
            return None
        return self._copies.out(source, target)

    def copy_back(self, source: torch.Tensor, target: torch.Tensor) -> Moment | None:
        """Begin to copy to the device, whose later work waits for it; None: it is done."""
        if self._copies is None:
            target.copy_(source)
            return None
        return self._copies.back(source, target)

    def keep(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a device's tensor into host memory that isn't pinned, in pieces through a little that is.

        Both are contiguous. The next piece comes while one is copied on.
        """
        if self._copies is None:
            target.copy_(source)
            return
        coming: tuple[OnHost, torch.Tensor] | None = None
        for piece, place in zip(_pieces(source), _pieces(target), strict=True):
            following = self.out(piece), place
            if coming is not None:
                coming[0].give(coming[1])
            coming = following
        if coming is not None:
            coming[0].give(coming[1])

    def bring_back(self, kept: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what `keep` kept to a device's tensor, whose later work waits for it."""
        if self._copies is None:
            target.copy_(kept)
            return
        for piece, place in zip(_pieces(kept), _pieces(target), strict=True):
            room = self.room(piece.numel(), piece.dtype).copy_(piece)
            self.free(room, self._copies.back(room, place))

    def on_device(self, kept: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The values of contiguous host memory that isn't pinned as a tensor of the device; itself if it is there."""
        if self._copies is None or kept.is_cuda:
            return kept.to(device)
        target = torch.empty(kept.shape, dtype=kept.dtype, device=device)
        self.bring_back(kept, target)
        return target

    def out(self, tensor: torch.Tensor) -> "OnHost":
        """Begin to copy a tensor to the host."""
        tensor = tensor.detach()
        if self._copies is None:
            return OnHost(self, tensor.contiguous(), None)
        host = self.room(tensor.numel(), tensor.dtype).view(tensor.shape)
        return OnHost(self, host, self._copies.out(tensor, host))

    def take_to(self, device: torch.device, host: torch.Tensor) -> torch.Tensor:
        """The values as a tensor of the device. The host memory, which `room` gave, is taken back."""
        if self._copies is None:
            return host.to(device)
        target = torch.empty(host.shape, dtype=host.dtype, device=device)
        self.free(host, self._copies.back(host, target))
        return target


class OnHost:
    """A tensor on its way to the host."""

    def __init__(self, memory: HostMemory, host: torch.Tensor, moment: Moment | None) -> None:
        self._memory, self._host, self._moment = memory, host, moment

    def ready(self) -> torch.Tensor:
        """The values, once they have come."""
        if self._moment is not None:
            self._moment.synchronize()
            self._moment = None
        return self._host

    def back(self, target: torch.Tensor) -> None:
        """Begin to copy the values, which may have been changed, to the device; they are out of use then."""
        if self._host.data_ptr() != target.data_ptr():
            self._memory.free(self._host, self._memory.copy_back(self._host, target))

    def give(self, target: torch.Tensor) -> None:
        """Copy the values to other host memory once they have come; they are out of use then."""
        target.copy_(self.ready())
        self.free()

    def free(self) -> None:
        """Called when the values are out of use."""
        self._memory.free(self._host)


def host_memory_of(device: torch.device) -> HostMemory:
    """The process's host memory for tensors of a device."""
    # The CPU stand-in makes host tensors for the device.
    return _on_host() if torch.empty(0, device=device).device.type == "cpu" else _of_current_device()


@functools.cache
def _on_host() -> HostMemory:
    return HostMemory(None)


@functools.cache
def _of_current_device() -> HostMemory:
    return HostMemory(CudaCopies())
