# SPDX-License-Identifier: Apache-2.0
"""New objects that take over the memory of old ones, chunk by chunk, where both hold the same shard.

May import torch, `plan` and this package. Megatron builds a model's chunks, then their buffers for gradients, then the
optimizer with its masters. Parameters take over memory between the first two (in the constructor of Megatron's DDP,
which calls `parameters_of`), masters and moments after the third. Buffers for gradients give theirs back until then.
So no more is in use at any time than while training. Nothing writes to what has been taken over before the new objects
are in force, so old objects stay whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_resihp.integration.replacing import take_apart
from megatron_resihp.integration.trained import Trained, parts_of
from megatron_resihp.plan import Shard


class Succession:
    """One rebuild's. Neither side has parameters in the buffers of a distributed optimizer: these are no state.

    Args:
        old: what is trained until now; its own gradients are freed.
        chunks: number of a new chunk → number of the old one whose shard it has.
        whole: bytes of all that is old.
    """

    def __init__(self, old: Trained, chunks: Mapping[int, int], whole: int = 0) -> None:
        self.whole = whole
        self._old, self._chunks = old, chunks
        self._built: list[Any] = []
        self._pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []

    def parameters_of(self, module: torch.nn.Module, in_buffers: bool) -> None:
        """Called for one new chunk after the other, before it has gradients.

        Args:
            in_buffers: whether its parameters are about to move into buffers.
        """
        number = self._chunks.get(len(self._built))
        if number is None or in_buffers:
            return
        chunk: Any = self._old.model[number]
        new, old = _named(module), _named(chunk)
        if _forms(new) != _forms(old) or any(buffer.param_data is not None for buffer in chunk.buffers):
            return
        for name, parameter in new.items():
            parameter.data = old[name].data
            self._pairs.append((old[name], parameter))

    def built(self, chunk: Any) -> None:
        """A new chunk has gradients now; they are of no use before the first iteration."""
        chunk.offload_grad_buffers()
        self._built.append(chunk)

    def optimizer_of(self, new: Trained) -> None:
        """Let the optimizer's state of these parameters be the old one's."""
        before, after = _inner(self._old), _inner(new)
        for old, parameter in self._pairs:
            master, was = getattr(parameter, "main_param", None), getattr(old, "main_param", None)
            key, old_key = parameter, old
            if master is not None and was is not None:
                master.data = was.data
                key, old_key = master, was
            if id(key) in after and id(old_key) in before:
                after[id(key)].state[key] = dict(before[id(old_key)].state[old_key])

    def return_gradients(self) -> None:
        """All that the new objects' state needs beside is done with."""
        for chunk in self._built:
            chunk.restore_grad_buffers()

    def give_up(self) -> None:
        """New objects come to nothing, also those that are not whole."""
        take_apart(self._built)
        self._built.clear()
        self._pairs.clear()


def unchanged(held: Sequence[Shard], wanted: Sequence[Shard]) -> dict[int, int]:
    """Number of a new chunk → number of an old chunk with the same shard."""
    return {new: held.index(shard) for new, shard in enumerate(wanted) if shard in held}


def _named(module: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters by names without those of wrappers."""
    return {name.replace("module.", ""): parameter for name, parameter in module.named_parameters()}


def _forms(parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (each.shape, each.dtype, type(each.data)) for name, each in parameters.items()}


def _inner(trained: Trained) -> dict[int, Any]:
    """The optimizer that steps each parameter, or its master, by identity."""
    optimizers = [part.optimizer for part in parts_of(trained.optimizer) if not part.is_stub_optimizer]
    return {id(p): each for each in optimizers for group in each.param_groups for p in group["params"]}
