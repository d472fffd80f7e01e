# SPDX-License-Identifier: Apache-2.0
"""Checkpoints under a heterogeneous plan in the format of Megatron's distributed optimizer, for jobs that have it.

Under a heterogeneous plan every holder of a slice has all of its state, in an optimizer that is not distributed
(`optimizer_whole.py`). Of Megatron's formats of the distributed one's state `fully_reshardable` has whole tensors too,
and can be loaded in any layout. It differs from that of other optimizers in masters' keys, which 32-bit parameters have
too, and in where the count of steps is. What differs is added, so that jobs with the flag and without it can load. May
import megatron and this package.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.trained import parts_of, takes_matrices

TYPE = "distrib_optim_sharding_type"
"""Where a checkpoint's metadata says how the distributed optimizer's state is stored; absent if it has none."""
RESHARDABLE = "fully_reshardable"
MASTER_KEY = "optimizer.state.param."


def wrap_metadata(runtime: Runtime, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """What Megatron says of a checkpoint, and what the plan's mode adds."""

    @functools.wraps(original)
    def build_sharded_state_dict_metadata(*positional: Any, **options: Any) -> dict[str, Any]:
        return {**original(*positional, **options), **runtime.mode.state.checkpoint_metadata}

    return build_sharded_state_dict_metadata


def has_stepped(optimizer: Any) -> bool:
    """Whether the optimizers have taken a step; all working workers ask together, as some may have nothing to train."""
    states = [part.optimizer.state for part in parts_of(optimizer) if not part.is_stub_optimizer]
    own = any(any(state.values()) for state in states)  # whoever only looks a parameter up leaves an empty one
    some = torch.tensor([own], dtype=torch.int, device="cuda")
    dist.all_reduce(some, op=dist.ReduceOp.MAX)
    return bool(some.item())


def add_reshardable(
    saved: dict[Any, Any], optimizer: Any, model: Sequence[Any], chunks: Mapping[str, Any]
) -> list[ShardedTensor | ShardedTensorFactory]:
    """Add to what an optimizer saves all that a distributed one needs of it to load it.

    Args:
        saved: the optimizer's sharded state dict, or those of a chained one's parts by number; common state is added.
        optimizer: its optimizer, which is not distributed.
        model: this worker's chunks.
        chunks: their sharded state dicts.

    Returns:
        the masters, under their keys there.

    Raises:
        ValueError: no step was taken yet, as with a first loss scale that is too large; or what is missing is a 16-bit
            parameter's master, or a trained parameter in `chunks`.
    """
    add_common(saved, optimizer)
    return list(_masters(model, chunks))


def add_common(saved: dict[Any, Any], optimizer: Any) -> None:
    """The common state's part of `add_reshardable`.

    Raises:
        ValueError: no step was taken yet.
    """
    parts = parts_of(optimizer)
    for part, own in zip(parts, saved.values() if len(parts) > 1 else [saved], strict=True):
        if not takes_matrices(part):  # none is in what Megatron's distributed optimizer loads
            _add_common(own)


def _add_common(own: dict[str, Any]) -> None:
    """What DistributedOptimizer.load_state_dict reads: parameter groups with counts of steps, and the format's name."""
    # An optimizer of 32-bit parameters has no level between.
    inner = own.get("optimizer", own)
    counted = inner["state"].get("common_step")
    groups = [{name: value for name, value in group.items() if name != "params"} for group in inner["param_groups"]]
    for group in groups:
        if counted is not None:
            group["step"] = int(counted)
        if "step" not in group:
            raise ValueError("the optimizer has not taken a step yet, so its state could not be loaded: save later")
    own["optimizer"] = {**own.get("optimizer", {}), "param_groups": groups}
    own["param_state_sharding_type"] = RESHARDABLE


def _masters(model: Sequence[Any], chunks: Mapping[str, Any]) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    places = {id(base.data): base for base in nested_values(chunks)
              if isinstance(base, ShardedTensor | ShardedTensorFactory)}  # fmt: skip
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad:
                continue
            if id(parameter) not in places:
                raise ValueError(f"{name} is trained and not among what the model saves")
            master = getattr(parameter, "main_param", None)
            master = parameter if master is None else master
            if master.dtype != torch.float32:
                raise ValueError(f"{name} has no master")
            yield _as_master(places[id(parameter)], master)


def _as_master(place: ShardedTensor | ShardedTensorFactory, master: torch.Tensor) -> Any:
    changed: dict[str, Any] = {"key": MASTER_KEY + place.key, "data": master}
    if isinstance(place, ShardedTensor):
        changed["dtype"] = master.dtype
    return replace(place, **changed)
