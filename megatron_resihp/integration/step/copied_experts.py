# SPDX-License-Identifier: Apache-2.0
"""What a copy of another worker's experts is on a worker that has no modules for them: by slices, and by place in a
checkpoint.

An owner and the keeper of its copy are at the same coordinate, so they have the same layers, and the keeper has an
expert of each of these, too. What it knows of that one's parameters holds for the other's. May import torch, `plan` and
modules of this package that know no runtime.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_resihp.integration.state.parameter_slices import Beside, Piece, number_of_expert, pieces_of, renumbered
from megatron_resihp.integration.step.optimizer_copy import ExpertCopy
from megatron_resihp.integration.step.optimizer_shards import Tensors, named_parameters, shaped
from megatron_resihp.integration.trained import Trained
from megatron_resihp.plan import Shard


def siblings(own: Mapping[str, torch.nn.Parameter], names: Sequence[str]) -> dict[str, str]:
    """By name of a parameter of an expert, the same parameter's name in an expert of this worker's.

    Args:
        own: this worker's parameters by name.
        names: of any parameters; those of no expert, or of one that this worker has no sibling of, are left out.
    """
    known: dict[str, str] = {}
    for name in own:
        if number_of_expert(name) is not None:
            known.setdefault(renumbered(name, 0), name)
    experts = {name: renumbered(name, 0) for name in names if number_of_expert(name) is not None}
    return {name: known[key] for name, key in experts.items() if key in known}


def beside(
    trained: Trained, shards: Sequence[Shard], experts: ExpertCopy, cuts: int, tied_head: int | None, shares: int
) -> Beside:
    """A copy by slices.

    Args:
        trained: the keeper's own objects.
        shards: what each of their chunks holds.
        experts: the copy.
        cuts, tied_head, shares: as of `pieces_of`.

    Raises:
        RuntimeError: the keeper's own layers are others.
    """
    own, part = named_parameters(trained), experts.copy.part
    like = siblings(own, [where.name for where in part])
    pieces_like: dict[int, list[Piece]] = {}
    for piece in pieces_of(trained.model, shards, cuts, tied_head, shares):
        pieces_like.setdefault(id(piece.parameter), []).append(piece)
    pieces: list[Piece] = []
    states: dict[int, Tensors] = {}
    for where, entry in part.items():
        if where.name not in like:
            raise RuntimeError(f"worker {experts.copy.owner} has {where.name}, the keeper of its copy nothing like it")
        parameter, number = own[like[where.name]], number_of_expert(where.name)
        assert number is not None
        stands_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        states[id(stands_in)] = shaped(stands_in, entry.tensors)
        for piece in pieces_like[id(parameter)]:
            chunk: Any = trained.model[piece.chunk]
            share = number * shares // chunk.config.num_moe_experts
            name = renumbered(piece.name, number)
            pieces.append(replace(piece, slice=piece.slice._replace(share=share), name=name, parameter=stands_in))
    return Beside(experts.copied, pieces, states)
