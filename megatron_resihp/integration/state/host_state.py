# SPDX-License-Identifier: Apache-2.0
"""The old objects' state in host memory, where the device has no room for old and new state together.

May import torch, `executor` and this package. The copy is whole before the device's memory is freed, and then is the
state until the new objects are in force. So there is a complete state in one of the two at any moment. Tensors of the
old objects lead to it: it moves, is digested and is saved from there. No step is taken with it.
"""

import torch

from megatron_resihp.executor.host_memory import HostMemory, host_memory_of
from megatron_resihp.integration.state.footprint import state_tensors
from megatron_resihp.integration.trained import Trained


@torch.no_grad()
def move_to_host(trained: Trained, memory: HostMemory | None = None) -> None:
    """Free the device's memory that these objects' state is in; scalars stay where they are.

    Args:
        memory: through which it goes; None: the process's own.

    Raises:
        RuntimeError: the host has too little memory; then nothing has moved.
    """
    if trained.away:
        return
    tensors = [each for each in state_tensors(trained) if each.dim() and each.untyped_storage().nbytes()]
    freed = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    copies = {key: torch.empty(storage.nbytes(), dtype=torch.uint8) for key, storage in freed.items()}
    for key, storage in freed.items():
        (memory or host_memory_of(storage.device)).keep(_bytes_in(storage), copies[key])
    for tensor in tensors:
        copy = copies[tensor.untyped_storage()._cdata].untyped_storage()
        trained.away.append((tensor, tensor.data))
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
            copy, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    for storage in freed.values():
        _resize(storage, 0)


def discard(trained: Trained) -> None:
    """Free the device's memory of objects that hold no state, which are never used again. Shapes stay."""
    for tensor in state_tensors(trained):
        if tensor.dim():
            storage = tensor.untyped_storage()
            tensor.data = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
            _resize(storage, 0)


@torch.no_grad()
def return_to_device(trained: Trained, memory: HostMemory | None = None) -> None:
    """The objects go on being used.

    Args:
        memory: through which their state goes; None: the process's own.

    Raises:
        OutOfMemoryError: the device has too little memory; then nothing has moved.
    """
    if not trained.away:
        return
    places = {was.untyped_storage()._cdata: (tensor, was.untyped_storage()) for tensor, was in trained.away}
    try:
        for tensor, storage in places.values():
            copy = tensor.untyped_storage()
            _resize(storage, copy.nbytes())
            (memory or host_memory_of(storage.device)).bring_back(_bytes_in(copy), _bytes_in(storage))
    except BaseException:
        for _, storage in places.values():
            _resize(storage, 0)
        raise
    for tensor, was in trained.away:
        tensor.data = was
    trained.away.clear()


def _resize(storage: torch.UntypedStorage, size: int) -> None:
    """Memory that some library has lent to a tensor, such as a message's on the stand-in, keeps its size."""
    if storage.resizable():
        storage.resize_(size)


def _bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
