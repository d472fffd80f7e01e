# SPDX-License-Identifier: Apache-2.0
"""Where Megatron's distributed checkpoints have what this worker holds, without any other worker. May import megatron.

Parameters are told by places, so that whatever is shaped like one (its master, its moments, ranges of these) can be put
together from several workers' files without a model.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing

from megatron_resihp.integration.emergency.alone import as_holder_of, world_of_one
from megatron_resihp.integration.emergency.contents import EXPERT_IN_KEY, Place, View
from megatron_resihp.integration.state.fragments import fragments_of
from megatron_resihp.integration.state.reshardable import RESHARDABLE, TYPE, add_common
from megatron_resihp.integration.state.shard import align_steps
from megatron_resihp.integration.trained import Trained
from megatron_resihp.integration.world.heterogeneous_groups import MegatronGroups
from megatron_resihp.plan import Shard

EXPERTS: Final = ".experts."
OF_EACH: Final = ".linear_fc1."
"""Each expert has one."""
"""In the keys of what belongs to an expert."""


@dataclass
class Placed:
    """What Megatron would save of a worker's training objects, but for the tensors of its optimizer.

    Attributes:
        parameters: the places of each trained parameter, by identity.
        others: tensors that are not trained, by the name of their place.
        objects: what is no tensor and differs between layers.
        optimizer: what all workers' optimizers have alike; nothing of one whose state is in parts.
        metadata: what a checkpoint says of its contents.
    """

    parameters: dict[int, tuple[Place, ...]]
    others: dict[str, tuple[tuple[Place, ...], torch.Tensor]]
    objects: list[ShardedObject]
    optimizer: dict[Any, Any]
    metadata: dict[str, Any]


def placed(
    trained: Trained,
    shards: Sequence[Shard],
    groups: MegatronGroups,
    args: Any,
    whole: Mapping[str, Any],
    in_parts: bool,
) -> Placed:
    """Ask Megatron; this worker has no groups.

    Args:
        shards: what each chunk of the model holds.
        groups: Megatron's table of groups.
        args: with the job's own sizes.
        whole: what the metadata says of whole states of a distributed optimizer; empty: the job has none.
        in_parts: whether its state is in parts now.

    Raises:
        ValueError: a part of a parameter is no view of it.
    """
    with world_of_one() as alone:
        metadata = checkpointing._build_sharded_state_dict_metadata(args, dp_cp_group=alone)
        metadata |= whole
        chunks = {}
        for number, (chunk, shard) in enumerate(zip(unwrap_model(trained.model), shards, strict=True)):
            with as_holder_of(shard, groups, alone):
                chunks[f"model{number}"] = chunk.sharded_state_dict(metadata=metadata)
        optimizer = {} if in_parts else _common_of(trained.optimizer, chunks, metadata)
    del metadata["dp_cp_group"]
    return _sorted_out(trained, chunks, optimizer, metadata)


def _common_of(optimizer: Any, chunks: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[Any, Any]:
    """What an optimizer saves besides tensors."""
    if optimizer.is_stub_optimizer:
        return {}
    align_steps(optimizer)
    saved = optimizer.sharded_state_dict(dict(chunks), metadata=metadata)
    if metadata.get(TYPE) == RESHARDABLE:
        add_common(saved, optimizer)
    _, common = extract_sharded_base(saved)
    return dict(common)


def _sorted_out(
    trained: Trained, chunks: Mapping[str, Any], optimizer: dict[Any, Any], metadata: dict[str, Any]
) -> Placed:
    trainable = {id(each) for chunk in trained.model for each in chunk.parameters() if each.requires_grad}
    found = Placed({}, {}, [], optimizer, metadata)
    for base in nested_values(dict(chunks)):
        if isinstance(base, ShardedObject):
            found.objects.append(base)
        elif isinstance(base, ShardedTensor | ShardedTensorFactory):
            places = tuple(places_of(base))
            if id(base.data) in trainable:
                found.parameters[id(base.data)] = places
            else:
                found.others[f"{base.key}@{list(places[0].offset)}"] = places, base.data
    return found


def objects_of_experts(objects: Iterable[ShardedObject], numbers: Sequence[int]) -> list[ShardedObject]:
    """What other experts have that is no tensor. Those of a layer have the same: settings of their modules.

    Args:
        objects: of this worker's, of experts and of anything else.
        numbers: of the other experts, among all of their layer.
    """
    objects = [each for each in objects if EXPERTS in each.key]
    axes = {_layer(each): len(each.global_offset) for each in objects if OF_EACH in each.key}
    of_one: dict[tuple[Any, ...], ShardedObject] = {}
    for each in objects:
        if len(each.global_offset) < axes.get(_layer(each), 0):
            continue  # of all experts of a layer together
        single = EXPERT_IN_KEY.search(each.key) is not None
        at = each.global_offset if single else each.global_offset[:-1]
        of_one.setdefault((EXPERT_IN_KEY.sub("", each.key), at), each)
    return [_of_expert(each, number) for each in of_one.values() for number in numbers]


def _layer(found: ShardedObject) -> str:
    return str(found.key).partition(EXPERTS)[0]


def _of_expert(found: ShardedObject, number: int) -> ShardedObject:
    """The same of another expert; as of `Place.of_expert`. Objects have no axes of their own."""
    data = copy.deepcopy(found.data)
    if EXPERT_IN_KEY.search(found.key):
        return replace(found, key=EXPERT_IN_KEY.sub(str(number), found.key), data=data)
    return replace(found, global_offset=(*found.global_offset[:-1], number), data=data)


def places_of(base: ShardedTensor | ShardedTensorFactory) -> Iterator[Place]:
    """The places of what Megatron saves as a tensor, or as several that it makes of one."""
    whole = torch.empty(base.data.shape, dtype=base.data.dtype, device="meta")
    made = nested_values(replace(base, data=whole).build()) if isinstance(base, ShardedTensorFactory) else [base]
    for part in made:
        data = whole if part is base else part.data
        if data is not whole and data._base is not whole:
            raise ValueError(f"{part.key} is not part of a parameter as it is")
        shape = tuple(data.shape)
        yield Place(
            part.key, View(shape, tuple(data.stride()), int(data.storage_offset())), tuple(part.global_shape),
            tuple(part.global_offset), fragments_of(part), part.prepend_axis_num, part.allow_shape_mismatch,
        )  # fmt: skip
