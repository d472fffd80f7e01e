# SPDX-License-Identifier: Apache-2.0
"""Which errors are of a communicator, which say that memory ran out, and which that a device is lost.

May import torch.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

import torch
import torch.distributed as dist

OUT_OF_MEMORY_WORDS: Final = ("out of memory", "cuda failure 2 ", "failed to cuda calloc", "failed to cuda host alloc")
"""Words in errors of torch and NCCL that say that the device, or pinned memory, is full."""

COMMUNICATOR_WORDS: Final = (
    "gloo", "nccl", "connection closed by peer", "connection reset by peer", "connection was likely closed",
    "broken pipe", "socket", "rendezvous", "processgroup", "tcpstore", "the epoch is broken", "the epoch was broken",
)  # fmt: skip

FAULTS: Final[Mapping[int, str]] = {
    214: "uncorrectable ecc error encountered",
    220: "uncorrectable nvlink error detected",
    226: "invalid access of peer gpu memory over nvlink or a hardware error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
}
"""CUDA's errors after which a process can't use its device any more, whatever it does, and their words."""
HARDWARE: Final = frozenset({214, 220, 226})
"""Those that no program can cause by itself."""
NCCLS_CODE: Final = re.compile(r"cuda failure (\d+)")
EXECUTION_FAILED: Final = (
    "cublas_status_execution_failed", "cublas error: the function failed to launch on the gpu",
    "cudnn_status_execution_failed",
)  # fmt: skip
"""What cuBLAS and cuDNN say in place of any of them, in torch's words or Transformer Engine's."""


def device_fault(error: BaseException) -> int | None:
    """The code of the fault of a device that has led to an error; None: there was none."""
    return next((code for each in _with_causes(error) if (code := _fault_in(each)) is not None), None)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The device stays lost, so an earlier fault counts even where an error was raised while it was dealt with."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__context__, each.__cause__]


def _fault_in(error: BaseException) -> int | None:
    code = getattr(error, "error_code", None)
    if code is not None or not isinstance(error, RuntimeError):
        return code if code in FAULTS else None
    text = str(error).lower()
    if match := NCCLS_CODE.search(text):
        return int(match[1]) if int(match[1]) in FAULTS else None
    if any(words in text for words in EXECUTION_FAILED):
        return 719
    return next((code for code, words in FAULTS.items() if words in text), None) if "cuda" in text else None


def fault_of_device() -> int | None:
    """The code of a fault after which this process can't use its device any more. Asks the device, and doesn't wait."""
    if not torch.cuda.is_available():
        return None
    try:
        torch.cuda.current_stream().query()
    except RuntimeError as error:
        return device_fault(error)
    return None


def is_communicator_error(error: BaseException) -> bool:
    """Whether an exception came from a communicator, as opposed to the model, the data or the user's code.

    A device without memory for a communicator is no dead peer: another try would fail as well. So would any on a
    device that is lost.
    """
    if is_out_of_memory(error) or device_fault(error) is not None:
        return False
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in COMMUNICATOR_WORDS)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or of the host ran out, in torch, in NCCL or in Python."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY_WORDS)
