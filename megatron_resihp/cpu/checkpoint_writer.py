# SPDX-License-Identifier: Apache-2.0
"""Megatron's persistent checkpoint writer, a process of its own that starts without the stand-in.

May import torch and megatron.
"""

from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_resihp import cpu

# This module is imported before anything is replaced, in a trainer as well as in a writer.
_plain_loop = PersistentAsyncCaller.async_loop
_plain_preload = FileSystemWriterAsync.preload_tensors


def async_loop(*arguments: Any) -> None:
    """What a writer runs. A spawned process finds this function by name, and so comes to install the stand-in."""
    cpu.install(force=True)
    _plain_loop(*arguments)


def preload_tensors(*arguments: Any) -> list[Any]:
    """Copy what is to be written, as from a device: the trainer goes on with its tensors, in memory that is shared."""
    return [
        (path, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for path, key, (data, tensors) in _plain_preload(*arguments)
    ]


def install() -> None:
    PersistentAsyncCaller.async_loop = staticmethod(async_loop)
    FileSystemWriterAsync.preload_tensors = staticmethod(preload_tensors)
