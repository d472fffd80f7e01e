# SPDX-License-Identifier: Apache-2.0
"""Memory of the stand-in's device, of a given size: what lives in it is counted, and more than that is refused.

May import torch. Only where RESIHP_CPU_MEMORY says how many bytes a device has, for tests of what takes how much: each
operation of the main thread is looked at, which makes a job slower. Memory is the device's if it was asked for there,
or is the result of an operation on something there. Memory that was asked for on the CPU is the host's, and stays so
if it is moved to the device without a copy.
"""

import os
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

SIZE: Final = "RESIHP_CPU_MEMORY"


class DeviceMemory(TorchDispatchMode):
    """Counts the bytes of all memory on the device, as `torch.cuda` does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.allocated = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._ends: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = function(*args, **options)
        given = {storage._cdata for storage in _storages([args, options])}
        if any(key in self._sizes for key in given):
            self.place(result, given)
        return result

    def place(self, made: Any, given: Collection[int] = ()) -> None:
        """The memory of these tensors is the device's, but for what was `given`.

        Raises:
            OutOfMemoryError: there is less left.
        """
        for storage in _storages(made):
            key = storage._cdata
            if key not in self._sizes and key not in given:
                self._take(storage.nbytes())
                self._sizes[key] = storage.nbytes()
                self._ends[key] = weakref.ref(storage, lambda _, key=key: self._end(key))  # type: ignore[misc]

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Called before a storage gets another size."""
        if storage._cdata in self._sizes:
            self._take(size - self._sizes[storage._cdata])
            self._sizes[storage._cdata] = size

    def _take(self, size: int) -> None:
        if self.allocated + size > self.size:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes; of {self.size}, {self.allocated} are in use."
            )
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def _end(self, key: int) -> None:
        self.allocated -= self._sizes.pop(key)
        del self._ends[key]


def _storages(found: Any) -> Iterable[torch.UntypedStorage]:
    for each in tree_iter(found):
        if isinstance(each, torch.Tensor) and each.layout is torch.strided:
            yield each.untyped_storage()


_memory: DeviceMemory | None = None


def current() -> DeviceMemory | None:
    """The device's memory; None: it has no size."""
    return _memory


def open_device() -> None:
    """Count from here on, if the device's memory has a size. Each worker calls it once, before it builds anything."""
    global _memory
    if _memory is None and SIZE in os.environ:
        _memory = DeviceMemory(int(os.environ[SIZE]))
        _memory.__enter__()


def place(made: Any) -> Any:
    """Called with what was made on the device; returns it."""
    if _memory is not None:
        _memory.place(made)
    return made


def resizing(resize: Callable[..., Any]) -> Callable[..., Any]:
    """A storage's `resize_` that takes from the device's memory, or gives back."""

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if _memory is not None:
            _memory.resize(storage, size)
        return resize(storage, size)

    return resize_


def install() -> None:
    torch.UntypedStorage.resize_ = resizing(torch.UntypedStorage.resize_)
