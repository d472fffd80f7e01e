# SPDX-License-Identifier: Apache-2.0
"""Modules' extra state: what they give to `get_extra_state`, neither parameters nor buffers, and change in forward.

It belongs to a layer and is thought to be the same on all that hold the layer or a cut of it, as it is in Megatron's
own checkpoints, which have it once a layer. Digests show where it isn't. May import torch, megatron, `control`,
`executor`, `plan` and this package.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_resihp.control.coordination.digests import EXTRA
from megatron_resihp.executor.digest import digest_tensors
from megatron_resihp.integration.state.parameter_slices import place_of
from megatron_resihp.plan import ParallelPlan, Shard
from megatron_resihp.plan.slices import Move

Layers = dict[int, dict[str, torch.Tensor]]
"""Layer → name of a module in it → its state, encoded."""

NOTHING: Final = (torch.nn.Module.get_extra_state, ColumnParallelLinear.get_extra_state,
                  RowParallelLinear.get_extra_state)  # fmt: skip
"""Those that never give any."""


class Bearer(NamedTuple):
    """A module that may have extra state."""

    layer: int
    name: str
    module: Any


class ExtraState:
    """What one worker has.

    Attributes:
        current: as the last step left it, of all layers that the worker holds.
        moves: under a plan, to workers without work in each iteration; None: not known yet.
        pending: as the forward passes of this iteration have left it, or as it has come into a new epoch.
    """

    def __init__(self) -> None:
        self.current: Layers = {}
        self.pending: Layers = {}
        self.moves: tuple[ParallelPlan, list[Move]] | None = None
        self._chunks: list[Any] = []
        self._layers: frozenset[int] = frozenset()
        self._asked: list[Bearer] = []

    def layers(self, model: Sequence[Any], shards: Sequence[Shard]) -> frozenset[int]:
        """The layers of these chunks that may have any. `shards`: of each chunk."""
        if self._chunks != list(model):
            self._chunks, self._asked = list(model), list(bearers_of(model, shards))
            self._layers = frozenset(each.layer for each in self._asked)
        return self._layers

    def collect(self, model: Sequence[Any], shards: Sequence[Shard], after_forward: bool = True) -> Layers:
        """What these chunks' modules have. Who has nothing after an epoch's first iteration isn't asked again.

        Args:
            after_forward: whether each module has run.
        """
        self.layers(model, shards)
        found = collected(self._asked)
        if after_forward:
            self._asked = [each for each in self._asked if each.name in found.get(each.layer, ())]
        return found

    def adopt(self) -> None:
        """The step of this iteration is taken, or the new epoch begins."""
        self.current = self.pending


def bearers_of(model: Sequence[Any], shards: Sequence[Shard]) -> Iterator[Bearer]:
    """The modules that may have extra state. `shards`: of each chunk."""
    for chunk, shard in zip(model, shards, strict=True):
        for name, module in chunk.named_modules():
            if type(module).get_extra_state not in NOTHING:
                yield Bearer(*place_of(name.replace("module.", ""), shard, None, chunk), module)


def collected(bearers: Iterable[Bearer]) -> Layers:
    """Copies of what they have."""
    found: Layers = {}
    for layer, name, module in bearers:
        state = module.get_extra_state() if _keeps(module) else None
        if state is not None and not (isinstance(state, torch.Tensor) and not state.numel()):
            found.setdefault(layer, {})[name] = _encoded(state)
    return found


def put_back(bearers: Iterable[Bearer], layers: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    """Give modules what they had."""
    for layer, name, module in bearers:
        if (state := layers.get(layer, {}).get(name)) is not None:
            module.set_extra_state(decoded(state))


def extra_digests(layers: Mapping[int, Mapping[str, torch.Tensor]]) -> dict[str, str]:
    """A digest of each layer's, by the keys of `control.coordination.digests`."""
    return {
        f"{layer}/{EXTRA}/1": digest_tensors({
            path: value for name, state in named.items() for path, value in _leaves(name, decoded(state))
        })
        for layer, named in sorted(layers.items())
    }  # fmt: skip


def _keeps(module: Any) -> bool:
    """Whether what a module gives is worth keeping. Transformer Engine's layers give their settings, too, at the cost
    of waiting for the device; of its recipes only delayed scaling has a history."""
    meta = getattr(module, "fp8_meta", None)
    return meta is None or any(hasattr(each, "amax_history") for each in meta.values())


def _leaves(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors and plain values; of other objects only the type counts: they may be pickled unlike elsewhere."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{path}/{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _leaves(f"{path}/{index}", inner)
    else:
        plain = value is None or isinstance(value, bool | int | float | str | bytes)
        yield f"{path}={value!r}" if plain else f"{path}:{type(value).__qualname__}", torch.empty(0)


def _encoded(state: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def decoded(state: torch.Tensor) -> Any:
    """What a module has given."""
    return torch.load(io.BytesIO(state.cpu().numpy().tobytes()), map_location="cpu", weights_only=False)
