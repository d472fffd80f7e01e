# SPDX-License-Identifier: Apache-2.0
"""Patch: checkpoints under a heterogeneous plan, in Megatron's distributed format, which a job of any layout can load.

Replaces checkpointing.generate_state_dict, which save_checkpoint() asks for what a worker writes. Megatron expects one
shape of shard per tensor, replicas that are alike, and a grid of ranks for random streams. Here every tensor is
cut wherever some worker's shard ends, and of each part one holder writes its copy (DESIGN section 5). May import
megatron and this package.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.training.checkpointing import get_checkpoint_name

from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.fragments import cut, finest, fragments_of
from megatron_resihp.integration.state.reshardable import TYPE, add_reshardable
from megatron_resihp.integration.state.shard import align_steps
from megatron_resihp.integration.world.heterogeneous import HeterogeneousView
from megatron_resihp.integration.world.heterogeneous_groups import Sizes, as_stage

FORMAT = "torch_dist"
PARTS = "parts"
"""Where in a state dict the parts are; loading goes by the tensors' own keys."""

type Shard = ShardedTensor | ShardedObject


class Named(NamedTuple):
    """What tells a part of a tensor or object from all others, and how large it is."""

    key: str
    offset: tuple[int, ...]
    size: int


@contextmanager
def distributed_format(args: Any, announce: bool) -> Iterator[str]:
    """Save in a format that takes any plan; yields its name.

    Megatron's older format has one file for each stage and TP rank, and only a uniform plan consists of such.

    Args:
        announce: whether this worker says so if it is not the job's own.
    """
    if args.use_dist_ckpt:
        yield args.ckpt_format
        return
    if announce:
        print(f"resihp: saving in format {FORMAT}, not {args.ckpt_format}, which can't hold the plan in force; "
              f"load it with --ckpt-format {FORMAT}", flush=True)  # fmt: skip
    kept = args.ckpt_format, args.use_dist_ckpt
    args.ckpt_format, args.use_dist_ckpt = FORMAT, True
    try:
        yield FORMAT
    finally:
        args.ckpt_format, args.use_dist_ckpt = kept


def leave_other_format_behind(path: str, iteration: int) -> None:
    """Before a save in Megatron's older format: what an abandoned run has saved of the same iteration under another
    plan must not be loaded in its place, as Megatron does wherever it finds the distributed format's own file."""
    folder = get_checkpoint_name(path, iteration, return_base_dir=True)
    Path(folder, CONFIG_FNAME).unlink(missing_ok=True)


def wrap_generate_state_dict(runtime: Runtime, original: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """What this worker writes under the plan in force; all working workers call it together."""

    @functools.wraps(original)
    def generate_state_dict(*positional: Any, **options: Any) -> dict[str, Any]:
        return runtime.mode.state.state_dict(functools.partial(original, *positional, **options))

    return generate_state_dict


def state_in_parts(call: functools.partial[dict[str, Any]], own_args: Any, view: HeterogeneousView) -> dict[str, Any]:
    """What a worker writes under a heterogeneous plan, cut and dealt out; all working workers call it together.

    Args:
        call: of Megatron's generate_state_dict, which this stands for.
        own_args: the arguments with the job's own sizes.
    """
    bound = inspect.signature(call.func).bind(*call.args, **call.keywords)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    chunks = _model_state(view, given.model, given.model_sd_kwargs)
    state: dict[str, Any] = {"args": own_args, "checkpoint_version": 3.0, "iteration": given.iteration, **chunks}
    if not given.args.no_save_optim:
        if not given.optimizer.is_stub_optimizer:
            align_steps(given.optimizer)
            state["optimizer"] = given.optimizer.sharded_state_dict(chunks, **given.optim_sd_kwargs)
            if TYPE in given.optim_sd_kwargs["metadata"]:
                state["masters"] = add_reshardable(state["optimizer"], given.optimizer, given.model, chunks)
        state["opt_param_scheduler"] = given.opt_param_scheduler.state_dict()
    apply_factories(state)
    sharded, common = extract_sharded_base(state)
    return {**common, PARTS: own_parts(list(nested_values(sharded)), dist.get_rank(), _gather)}


def _model_state(view: HeterogeneousView, model: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for number, chunk in zip(view.own_chunks, model, strict=True):
        with as_stage(number, len(view.chunks)):
            found[f"model{number}"] = chunk.sharded_state_dict(**options)
    return found


def args_with(sizes: Sizes, args: Any) -> Any:
    """The arguments with the job's own sizes.

    Random streams are not saved: they start anew in each epoch anyway, and there is one for each place in the plan, not
    in the job's own layout. Megatron then starts new ones.
    """
    own = copy.copy(args)
    vars(own).update(sizes.own(args), no_save_rng=True)
    return own


def _gather(own: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def own_parts(shards: Sequence[Shard], rank: int, gather: Callable[[Any], list[Any]]) -> list[Shard]:
    """The parts of what this worker holds that it alone is to write.

    Args:
        shards: what it holds.
        rank: its place among the workers.
        gather: brings together what all workers give it.
    """
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    fragments = finest(gather({tensor.key: fragments_of(tensor) for tensor in tensors}))
    parts: list[Shard] = [shard for shard in shards if isinstance(shard, ShardedObject)]
    for tensor in tensors:
        parts += cut(tensor, fragments[tensor.key])
    # A worker may hold a part twice: word embeddings, and the head that shares them.
    named = {_name(part): part for part in parts}
    writers = _deal(gather(list(named)))
    return [replace(part, replica_id=0) for name, part in named.items() if writers[name] == rank]


def _name(part: Shard) -> Named:
    size = part.data.numel() * part.data.element_size() if isinstance(part, ShardedTensor) else 0
    return Named(part.key, tuple(part.global_offset), size)


def _deal(held: Sequence[Sequence[Named]]) -> dict[Named, int]:
    """Which rank writes which part, so that all ranks write about as much.

    Args:
        held: for each rank the parts that it holds.

    Returns:
        for each part the rank that writes it; the same on every worker.
    """
    holders: dict[Named, list[int]] = {}
    for rank, names in enumerate(held):
        for name in names:
            holders.setdefault(name, []).append(rank)
    written = [0] * len(held)
    writers = {}
    # Who has no choice comes first, then large parts.
    for name in sorted(holders, key=lambda name: (len(holders[name]), -name.size, name)):
        writers[name] = min(holders[name], key=lambda rank: (written[rank], rank))
        written[writers[name]] += name.size
    return writers
