# SPDX-License-Identifier: Apache-2.0
"""Which errors are of a communicator, and which say that memory ran out. May import torch."""

from typing import Final

import torch
import torch.distributed as dist

OUT_OF_MEMORY_WORDS: Final = ("out of memory", "cuda failure 2 ", "failed to cuda calloc", "failed to cuda host alloc")
"""Words in errors of torch and NCCL that say that the device, or pinned memory, is full."""

COMMUNICATOR_WORDS: Final = (
    "gloo", "nccl", "connection closed by peer", "connection reset by peer", "connection was likely closed",
    "broken pipe", "socket", "rendezvous", "processgroup", "tcpstore", "the epoch is broken", "the epoch was broken",
)  # fmt: skip


def is_communicator_error(error: BaseException) -> bool:
    """Whether an exception came from a communicator, as opposed to the model, the data or the user's code.

    A device without memory for a communicator is no dead peer: another try would fail as well.
    """
    if is_out_of_memory(error):
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
