# SPDX-License-Identifier: Apache-2.0
"""What a survivor writes where Megatron's files of a stage and TP rank don't do: all that it holds, by parameter.

The tensors are in one file. What they are is in another one beside it, as JSON (`contents`), so that what is missing
can be told without reading them. May import megatron and this package.
"""

import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_resihp.coding import encode
from megatron_resihp.integration.emergency.contents import MASTER, PARAM, Contents, Parameter, Place, Range
from megatron_resihp.integration.emergency.places import Placed, objects_of_experts, placed
from megatron_resihp.integration.modes.emergency_format import whole_metadata
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.parameter_slices import number_of_expert, pieces_of
from megatron_resihp.integration.state.reshardable import RESHARDABLE
from megatron_resihp.integration.state.shard import states_of
from megatron_resihp.integration.step import optimizer_shards
from megatron_resihp.integration.step.copied_experts import siblings
from megatron_resihp.integration.step.optimizer_buddies import steps_of
from megatron_resihp.integration.step.optimizer_copy import Kept
from megatron_resihp.integration.step.optimizer_shards import STATE, named_parameters, own_part, shaped
from megatron_resihp.integration.trained import Trained, parts_of, takes_matrices
from megatron_resihp.plan import Shard
from megatron_resihp.plan.slices import cuts_of, shares_of, slices_of
from megatron_resihp.protocol.published import EmergencyCheckpointOrder

Replace = Callable[[Path, Callable[[Path], Any]], None]
Kinds = dict[str, torch.Tensor]
Found = dict[str, dict[Range, Kinds]]
"""For each parameter by name, and for each range of its elements, what there is of it by kind."""


def write_parameters(runtime: Runtime, order: EmergencyCheckpointOrder, path: Path, replace: Replace) -> str:
    """Write this worker's part of an order, once it has taken the committed step; asks no other worker.

    Returns why it can't be joined with others' parts; empty: it can.

    Args:
        path: of the file of tensors.
        replace: writes a file at once.
    """
    assert order.commit is not None
    iteration, shards = order.commit.iteration, order.part_of(runtime.worker)
    held, kept = runtime.held, runtime.held.kept
    held.drop_failed_copy()
    where, why_not = _places(runtime)
    named = named_parameters(held.live)
    found = _whole(runtime, shards, named) if kept is None else _parts(held.live, kept, where, named)
    known = _known(list(found), named, where)
    parameters = {name: _described(*known[name], ranges) for name, ranges in found.items()}
    for name, (places, tensor) in where.others.items():
        found[name] = {(0, tensor.numel()): {PARAM: _copied(tensor)}}
        parameters[name] = _described(tensor, places, found[name])
    contents = Contents(
        runtime.worker, runtime.job.run, order.epoch, iteration, runtime.job.args.consumed_train_samples,
        runtime.job.own.chunks[-1].end, shards if kept is None else held.shards, parameters, why_not,
        held.copied, time.time(),
    )  # fmt: skip
    others = sorted({number for name in found.keys() - named.keys() if (number := number_of_expert(name)) is not None})
    objects = [*where.objects, *objects_of_experts(where.objects, others)]
    saved = {"tensors": found, "objects": objects, "metadata": where.metadata,
             "common": _common(runtime, iteration, where.optimizer)}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, lambda aside: torch.save(saved, aside))
    text = json.dumps(encode(contents), indent=1) + "\n"
    replace(path.with_suffix(".json"), lambda aside: aside.write_text(text))
    return why_not


def _places(runtime: Runtime) -> tuple[Placed, str]:
    """Where Megatron has what is held, and why that can't be told: the tensors are saved all the same."""
    held, job = runtime.held, runtime.job
    try:
        return placed(
            held.live, held.shards, runtime.setup.groups, job.args, whole_metadata(job), held.kept is not None
        ), ""
    except Exception as error:
        return Placed({}, {}, [], {}, {}), f"{type(error).__name__}: {error}"


def _known(
    names: Sequence[str], named: Mapping[str, torch.nn.Parameter], where: Placed
) -> dict[str, tuple[torch.nn.Parameter, tuple[Place, ...]]]:
    """By name a parameter of the same shape and type, and the places of what is meant: an expert's that only a copy is
    here of, too."""
    others = siblings(named, [name for name in names if name not in named])
    known = {}
    for name in names:
        own = named[others.get(name, name)]
        places = where.parameters.get(id(own), ())
        number = number_of_expert(name) if name in others else None
        known[name] = own, places if number is None else tuple(place.of_expert(number) for place in places)
    return known


def _whole(runtime: Runtime, shards: tuple[Shard, ...], named: Mapping[str, torch.nn.Parameter]) -> Found:
    """All state of the parameters that have something in these shards."""
    held, tied_head = runtime.held, runtime.job.own.tied_head
    both = *held.shards, *shards
    layout = cuts_of(both), tied_head, shares_of(both)
    wanted = slices_of(shards, *layout)
    written = {id(piece.parameter) for piece in pieces_of(held.live.model, held.shards, *layout)
               if piece.slice in wanted}  # fmt: skip
    states = states_of(held.live)
    found = {name: _kinds(states[id(each)], each) for name, each in named.items()
             if id(each) in written and id(each) in states}  # fmt: skip
    if held.experts is not None:
        part = held.experts.copy.part
        like = siblings(named, [where.name for where in part])
        found |= {where.name: _kinds(shaped(named[like[where.name]], entry.tensors), named[like[where.name]])
                  for where, entry in part.items() if where.name in like}  # fmt: skip
    return found


def _kinds(state: Mapping[str, torch.Tensor], parameter: torch.Tensor) -> dict[Range, Kinds]:
    """All of a whole parameter's state."""
    kinds = {kind.removeprefix(STATE): _copied(tensor) for kind, tensor in state.items()
             if tensor.shape == parameter.shape}  # fmt: skip
    return {(0, parameter.numel()): kinds}


def _parts(trained: Trained, kept: Kept, where: Placed, named: Mapping[str, torch.nn.Parameter]) -> Found:
    """What this worker has of a distributed optimizer, its own part and the copy. Parameters are masters, rounded.

    Those of which it has nothing are named, too: somebody else must have them. A copy may have experts that this
    worker has not.
    """
    part = {**(own_part(trained) if kept.owns else {}), **(kept.copy.part if kept.copy is not None else {})}
    found: Found = {name: {} for name, each in named.items() if id(each) in where.parameters}
    others = siblings(named, [at.name for at in part])
    for at, entry in part.items():
        if at.name not in named and at.name not in others:
            continue
        kinds = {MASTER if kind == optimizer_shards.MASTER else kind: _copied(tensor)
                 for kind, tensor in entry.tensors.items() if tensor.dim()}  # fmt: skip
        found.setdefault(at.name, {})[at.start, at.end] = kinds
    return found


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, without what else its storage has. What is there alone is not copied: memory may be short."""
    flat = tensor.detach().cpu().reshape(-1)
    return flat if flat.untyped_storage().nbytes() == flat.nbytes else flat.clone()


def _described(parameter: torch.Tensor, places: tuple[Place, ...], ranges: Mapping[Range, Kinds]) -> Parameter:
    kinds = {kind for found in ranges.values() for kind in found}
    return Parameter(
        str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape), places, tuple(ranges), tuple(sorted(kinds))
    )


def _common(runtime: Runtime, iteration: int, optimizer: dict[Any, Any]) -> dict[str, Any]:
    """What all workers have alike, as Megatron saves it. Random streams start anew where it is loaded."""
    trained, args = runtime.held.live, copy.copy(runtime.job.args)
    args.no_save_rng = True
    common = {
        "args": args, "checkpoint_version": 3.0, "iteration": iteration,
        "opt_param_scheduler": trained.scheduler.state_dict(),
        "num_floating_point_operations_so_far": runtime.tally.flops,
    }  # fmt: skip
    if runtime.held.kept is not None:
        optimizer = _common_in_parts(trained.optimizer, *_steps(runtime))
    return {**common, "optimizer": optimizer} if optimizer else common


def _steps(runtime: Runtime) -> tuple[int, bool]:
    """How many steps were taken, however the optimizer counts them (0: none), and whether for each parameter."""
    kept, trained = runtime.held.kept, runtime.held.live
    assert kept is not None
    part = {**(own_part(trained) if kept.owns else {}), **(kept.copy.part if kept.copy is not None else {})}
    counted = [int(entry.tensors["step"]) for entry in part.values() if "step" in entry.tensors]
    return max([*steps_of(runtime), *counted], default=0), bool(counted)


def _common_in_parts(optimizer: Any, steps: int, for_each: bool) -> dict[Any, Any]:
    """What Megatron's distributed optimizers save besides tensors, whichever part of them is current here.

    Args:
        steps: that were taken.
        for_each: whether they are counted for each parameter, as a layer-wise one then wants to know.
    """
    found: dict[int, dict[str, Any]] = {}
    for number, part in enumerate(parts_of(optimizer)):
        counts = not takes_matrices(part)
        said = {"step": steps} if counts else {}
        groups = [{name: value for name, value in group.items() if name != "params"} | said
                  for group in part.optimizer.param_groups]  # fmt: skip
        state = {"common_step": torch.tensor(float(steps))} if counts and for_each else {}
        scaler = {} if part.grad_scaler is None else {"grad_scaler": part.grad_scaler.state_dict()}
        found[number] = {"optimizer": {"state": state, "param_groups": groups},
                         "param_state_sharding_type": RESHARDABLE, **scaler}  # fmt: skip
    return found if len(found) > 1 else found[0]
