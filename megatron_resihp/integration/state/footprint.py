# SPDX-License-Identifier: Apache-2.0
"""What training objects take of the device, and what of that a rebuild can do without.

May import torch and this package.

From the moment at which a worker has applied the committed step, its gradients are of no use: the next iteration's
begin with zeros. So their buffers are freed before the next epoch's objects are built, and made again, zeroed, where
the old objects go on being used. All else of the old state stays whole until the new one is in force.
"""

from dataclasses import dataclass
from typing import Any

import torch

from megatron_resihp.integration.trained import Trained, parts_of

Storages = dict[int, int]
"""Bytes of each piece of memory, by identity."""


@dataclass(frozen=True)
class Footprint:
    """A rebuild's memory, of the state alone: no activations, no messages under way.

    Attributes:
        before: bytes of the old objects, gradients included.
        new: bytes that the new objects didn't take over from the old ones.
        most: bytes of both together, without the old gradients.
        to_host: bytes of the old ones that were in host memory meanwhile.
    """

    before: int
    new: int
    most: int
    to_host: int


def free_gradients(trained: Trained) -> None:
    """Free the old objects' gradients; a step can't be taken with them any more."""
    trained.lacks_gradients = True
    trained.optimizer.zero_grad(set_to_none=True)
    for chunk in _chunks(trained):
        chunk.offload_grad_buffers()


def bring_gradients_back(trained: Trained) -> None:
    """The old objects go on being used: give them buffers of zeros again, if they have none."""
    if trained.lacks_gradients:
        for chunk in _chunks(trained):
            chunk.restore_grad_buffers()
        trained.lacks_gradients = False


def bytes_of(trained: Trained, owned: Storages | None = None) -> int:
    """Bytes of all that, of gradients also where they are freed. `owned`: its `storages`, if they are known."""
    owned = storages(trained) if owned is None else owned
    buffers = [buffer for chunk in _chunks(trained) for buffer in _buffers(chunk)]
    freed = sum(buffer.grad_data_size * buffer.grad_data.element_size() for buffer in buffers)
    return sum(owned.values()) + freed + bytes_away(trained)


def storages(trained: Trained) -> Storages:
    """All memory of the device that parameters, gradients, buffers and the optimizer's state own."""
    away = {id(tensor) for tensor, _ in trained.away}
    gradients = [buffer.grad_data for chunk in _chunks(trained) for buffer in _buffers(chunk)]
    owned = (each.untyped_storage() for each in [*state_tensors(trained), *gradients] if id(each) not in away)
    return {storage._cdata: storage.nbytes() for storage in owned}


def bytes_away(trained: Trained) -> int:
    """Bytes of their state that is in host memory."""
    copies = (tensor.untyped_storage() for tensor, _ in trained.away)
    return sum({copy._cdata: copy.nbytes() for copy in copies}.values())


def state_tensors(trained: Trained) -> list[torch.Tensor]:
    """All parameters, buffers and tensors of the optimizer's state, each once."""
    tensors: list[Any] = []
    for chunk in _chunks(trained):
        tensors += [*chunk.module.parameters(), *chunk.module.buffers()]
        tensors += [buffer.param_data for buffer in _buffers(chunk)]
    for part in parts_of(trained.optimizer):
        if not part.is_stub_optimizer:
            tensors += [each for group in part.optimizer.param_groups for each in group["params"]]
            tensors += [value for state in part.optimizer.state.values() for value in state.values()]
    return list({id(each): each for each in tensors if isinstance(each, torch.Tensor)}.values())


def footprint_of(before: int, old: Storages, to_host: int, new: Storages) -> Footprint:
    """`before`: bytes of the old objects with their gradients; `old`: what is left of them; `to_host`: of the rest."""
    added = sum(size for key, size in new.items() if key not in old)
    return Footprint(before, added, sum(old.values()) + added, to_host)


def _chunks(trained: Trained) -> list[Any]:
    """Megatron's own DDP; no other is supported."""
    return list(trained.model)


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]
