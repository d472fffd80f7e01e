# SPDX-License-Identifier: Apache-2.0
"""`torch.cuda` with one device, which is the CPU: streams run in order, events read the clock. May import torch."""

import contextlib
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_resihp.cpu import device_memory

DEVICE_INDEX = 0

# Since this generation Megatron no longer asks for CUDA_DEVICE_MAX_CONNECTIONS=1, which means nothing on a CPU.
COMPUTE_CAPABILITY = (10, 0)


class Event:
    """A point in time. Work on a CPU is done when the call returns, so every event is complete once recorded."""

    def __init__(self, enable_timing: bool = False, **_options: Any) -> None:
        self.enable_timing = enable_timing
        self._seconds: float | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`."""
        if self._seconds is None or end._seconds is None:
            raise RuntimeError("both events must be recorded before their elapsed time is known")
        return (end._seconds - self._seconds) * 1000.0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: "Stream | None" = None) -> None:
        pass


class Stream:
    """An order of work. On a CPU there is one order, that of the calls."""

    device = torch.device("cpu")
    cuda_stream = 0

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -1)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass


_the_stream = Stream()


class use_device:
    """`with torch.cuda.device(...)`: there is only one. Like `torch.cuda.stream(...)` it may be entered again."""

    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_exception: Any) -> None:
        pass


class _no_ranges(contextlib.nullcontext[None]):
    """In the place of `torch.autograd.profiler.emit_nvtx`."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        super().__init__()


def _resident_bytes() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * resource.getpagesize()


def _peak_resident_bytes() -> int:
    # The kernel updates its own peak only now and then.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, _resident_bytes())


def _allocated_bytes(device: Any = None) -> int:
    """What is on the device, if its memory is counted, and the process' resident memory otherwise."""
    memory = device_memory.current()
    return _resident_bytes() if memory is None else memory.allocated


def _peak_bytes(device: Any = None) -> int:
    memory = device_memory.current()
    return _peak_resident_bytes() if memory is None else memory.peak


def _forget_peak(device: Any = None) -> None:
    memory = device_memory.current()
    if memory is not None:
        memory.peak = memory.allocated


def _memory_stats(device: Any = None) -> dict[str, int]:
    """What is on the device under the names of the allocator's main figures; the other figures read 0."""
    statistics: dict[str, int] = defaultdict(int)
    current, peak = _allocated_bytes(), _peak_bytes()
    for kind in ("allocated", "reserved", "active"):
        statistics |= {f"{kind}_bytes.all.current": current, f"{kind}_bytes.all.peak": peak}
    return statistics


def _memory_of_device(device: Any = None) -> tuple[int, int]:
    """Free bytes and all bytes, of the machine if the device has no size."""
    memory = device_memory.current()
    if memory is not None:
        return memory.size - memory.allocated, memory.size
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _device_properties(device: Any = None) -> SimpleNamespace:
    major, minor = COMPUTE_CAPABILITY
    return SimpleNamespace(
        name="CPU",
        major=major,
        minor=minor,
        total_memory=_memory_of_device()[1],
        multi_processor_count=os.cpu_count(),
    )


def _always(value: Any) -> Callable[..., Any]:
    """A new function for each name that it stands for: Dynamo refuses one object under two of torch's names."""
    return lambda *_arguments, **_options: value


DEVICE: dict[str, Any] = {
    "is_available": _always(True),
    "is_bf16_supported": _always(True),
    "is_current_stream_capturing": _always(False),
    "device_count": _always(1),
    "current_device": _always(DEVICE_INDEX),
    "set_device": lambda device=None: device_memory.open_device(),
    "device": use_device,
    "get_device_name": _always("CPU"),
    "get_device_capability": _always(COMPUTE_CAPABILITY),
    "get_device_properties": _device_properties,
    "synchronize": _always(None),
    "temperature": _always(0),
    "power_draw": _always(0),
    "utilization": _always(0),
    "clock_rate": _always(0),
}

STREAMS: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "stream": use_device,
    "current_stream": _always(_the_stream),
    "default_stream": _always(_the_stream),
    "set_stream": _always(None),
}

MEMORY: dict[str, Any] = {
    "empty_cache": _always(None),
    "reset_peak_memory_stats": _forget_peak,
    "reset_max_memory_allocated": _forget_peak,
    "memory_stats": _memory_stats,
    "memory_allocated": lambda device=None: _allocated_bytes(),
    "memory_reserved": lambda device=None: _allocated_bytes(),
    "max_memory_allocated": lambda device=None: _peak_bytes(),
    "max_memory_reserved": lambda device=None: _peak_bytes(),
    "device_memory_used": lambda device=None: _allocated_bytes(),
    "mem_get_info": _memory_of_device,
}

PROFILER: dict[str, Any] = {
    "cudart": _always(SimpleNamespace(cudaProfilerStart=_always(0), cudaProfilerStop=_always(0))),
    "check_error": _always(None),
}
"""Of a profiler of GPUs that listens to a program; none does."""

TENSOR_TYPES = (
    "FloatTensor",
    "DoubleTensor",
    "HalfTensor",
    "BFloat16Tensor",
    "ByteTensor",
    "CharTensor",
    "ShortTensor",
    "IntTensor",
    "LongTensor",
    "BoolTensor",
)


def install() -> None:
    for name, replacement in (DEVICE | STREAMS | MEMORY | PROFILER).items():
        setattr(torch.cuda, name, replacement)
    for name in TENSOR_TYPES:
        setattr(torch.cuda, name, getattr(torch, name))
    torch.cuda.nvtx.range_push = _always(None)
    torch.cuda.nvtx.range_pop = _always(None)
    torch.autograd.profiler.emit_nvtx = _no_ranges  # type: ignore[misc]
    # Work of the one stream is done when the call returns, so no memory is given to another's too early.
    torch.Tensor.record_stream = _always(None)
    # The CPU is no accelerator: with one, data loaders would pin memory and optimizers look for a graph capture.
    torch.accelerator.is_available = _always(False)
    torch.accelerator.current_accelerator = _always(None)
