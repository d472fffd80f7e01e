# SPDX-License-Identifier: Apache-2.0
"""Copies of experts that are held once, where no optimizer is shared out: made as an epoch begins, then stepped with
their owners.

The holders of a shard form a ring (`plan.copies`). A copy is all that the optimizer steps: masters, or parameters where
they have none, and moments. It takes each step itself, so only gradients cross. May import torch, `plan`, `executor`
and this package.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch

from megatron_resihp.executor.groups.side_group import MakeSideGroup, Post, SideGroup
from megatron_resihp.executor.transfer import receive_tensors, send_tensors, tell_all
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.room import free_on_host
from megatron_resihp.integration.state.shard import group_steps
from megatron_resihp.integration.step.buddies import nodes_of_job
from megatron_resihp.integration.step.optimizer_buddies import HOST, Ring, places_said, shards_under
from megatron_resihp.integration.step.optimizer_copy import ExpertCopy, PartCopy
from megatron_resihp.integration.step.optimizer_shards import (
    MASTER,
    Entry,
    Part,
    digest_of,
    expert_gradients,
    expert_part,
)
from megatron_resihp.integration.trained import Trained
from megatron_resihp.plan import Coordinate, ParallelPlan
from megatron_resihp.plan.copies import expert_copies_at, in_turns, kept_expert_copies

LOAD: Final = 64 << 20
"""Bytes of gradients that are brought together to be sent, unless one parameter has more."""
MOST_STATES: Final = 3
"""How many numbers an optimizer keeps at most of each that it steps, that one included; before its first step it has
not said yet."""


def keepers_under(runtime: Runtime, plan: ParallelPlan) -> dict[int, int]:
    """By each worker that is to keep a copy of experts, their owner."""
    if plan.expert_parallel == 1 or not runtime.job.copies_experts:
        return {}
    return kept_expert_copies(plan, nodes_of_job())


def join_expert_ring(plan: ParallelPlan, coordinate: Coordinate, me: int, make_group: MakeSideGroup) -> Ring | None:
    """This worker's edges; None if its experts are held by others, too."""
    edges = expert_copies_at(plan, coordinate, nodes_of_job())
    if not edges:
        return None
    workers = plan.grid.workers_at(coordinate)
    group = make_group(f"experts/{coordinate.stage}/{coordinate.tp_rank}", workers)
    return Ring(tuple(edge for edge in in_turns(edges) if me in edge), group)


# ---- in each step


def share_expert_gradients(trained: Trained, experts: ExpertCopy, ring: Ring, worker: int) -> None:
    """Send the own experts' summed gradients to the keeper of their copy, and get those of the copy kept here."""
    start, copy = time.monotonic(), experts.copy
    transfers: list[Iterator[Post]] = []
    for owner, keeper in ring.edges:
        if owner == worker:
            gradients = expert_gradients(trained)
            copy.cost.bytes_sent += sum(gradient.numel() * torch.float.itemsize for gradient in gradients)
            transfers.append(_sending(ring.group, keeper, gradients))
        else:
            copy.gradient = torch.empty(copy.elements)
            transfers.append(_receiving(ring.group, owner, copy.gradient, copy.sizes))
    ring.group.at_once(*transfers)
    copy.cost.exchange_s += time.monotonic() - start


def _sending(group: SideGroup, keeper: int, gradients: Sequence[torch.Tensor]) -> Iterator[Post]:
    """Few are brought together at a time: the device may have no room for all of them twice."""
    for load in loads_of([gradient.numel() for gradient in gradients]):
        flat = [gradient.float().view(-1) for gradient in gradients[load]]
        yield from group.sending(flat[0] if len(flat) == 1 else torch.cat(flat), keeper)


def _receiving(group: SideGroup, owner: int, gradient: torch.Tensor, sizes: Sequence[int]) -> Iterator[Post]:
    ends = [0, *accumulate(sizes)]
    for load in loads_of(sizes):
        yield from group.receiving(gradient[ends[load.start] : ends[load.stop]], owner)


def loads_of(sizes: Sequence[int]) -> list[slice]:
    """Which gradients cross together, the same on both sides. `sizes`: in elements."""
    loads, start, elements = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and (elements + size) * torch.float.itemsize > LOAD:
            loads.append(slice(start, index))
            start, elements = index, 0
        elements += size
    return [*loads, slice(start, len(sizes))] if sizes else []


# ---- at the start of an epoch


class Fresh(NamedTuple):
    """What the start of an epoch has made.

    Attributes:
        received: bytes.
        experts: the copy that this worker keeps; None: it keeps none.
        kept: whether all members keep the copies that the plan asks for.
    """

    received: int
    experts: ExpertCopy | None
    kept: bool


def fresh_copies(runtime: Runtime, trained: Trained, ring: Ring | None) -> Fresh:
    """Make the copies that the plan in force asks for, once experts are where it wants them; all members call it.

    All members keep copies or none does: the coordinator plans with all of them.

    Args:
        trained: what this worker has under the plan.
        ring: its own; None: it keeps no copy.

    Raises:
        RuntimeError: a copy is not what it is a copy of.
    """
    owners = keepers_under(runtime, runtime.view.plan)
    if not owners:
        return Fresh(0, None, True)
    part = expert_part(trained) if ring is not None else {}
    own = {"needs": needed_bytes(part), "gradients": gradient_bytes(part), "room": free_on_host() * 3 // 4}
    told = tell_all(runtime.mode.everybody, runtime.worker, own)
    tells = runtime.view.works and runtime.view.reports
    if (short := _short(owners, told)) is not None:
        if tells:
            print(f"resihp: keeps no copies of experts in epoch {runtime.epoch}: {short}", flush=True)
        return Fresh(0, None, False)
    if tells and not runtime.epoch:
        print(_said(told), flush=True)
    if ring is None:
        return Fresh(0, None, True)
    return _exchange(runtime, trained, part, ring)


def needed_bytes(part: Part) -> int:
    """Of host memory for a copy of this part, after its first step too, and for a gradient."""
    now = sum(tensor.nbytes for entry in part.values() for tensor in entry.tensors.values())
    masters = sum(entry.tensors[MASTER].nbytes for entry in part.values())
    return max(now, MOST_STATES * masters) + gradient_bytes(part)


def gradient_bytes(part: Part) -> int:
    """Of the gradients that cross in a step."""
    return sum(where.end - where.start for where in part) * torch.float.itemsize


def _short(owners: Mapping[int, int], told: Mapping[int, Mapping[str, int]]) -> str | None:
    """Which worker has too little memory for the copy that it would keep; None: none has."""
    for keeper, owner in sorted(owners.items()):
        needs, room = told[owner]["needs"], told[keeper]["room"]
        if needs > room:
            return f"worker {keeper} would need {_mib(needs)} of host memory, and may take {_mib(room)}"
    return None


def _said(told: Mapping[int, Mapping[str, int]]) -> str:
    """What a loss costs, and what that costs."""
    needs, gradients = (max(each[what] for each in told.values()) for what in ("needs", "gradients"))
    return (
        "resihp: each expert is held once, and another worker keeps a copy of it: losing one worker loses no expert, "
        "losing it together with the keeper of its copy ends the job; a copy takes "
        f"{_mib(needs)} of host memory, and {_mib(gradients)} of gradients cross for it in each step"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _exchange(runtime: Runtime, trained: Trained, part: Part, ring: Ring) -> Fresh:
    received, experts = 0, None
    for owner, keeper in ring.edges:
        if owner == runtime.worker:
            named = {f"{index}/{name}": tensor for index, entry in enumerate(part.values())
                     for name, tensor in entry.tensors.items()}  # fmt: skip
            places = [(where, entry.place) for where, entry in part.items()]
            steps = [step for step in group_steps(trained) if step is not None]
            said = {"places": places, "steps": steps, "digest": digest_of(part)}
            send_tensors(ring.group, keeper, named, said)
        else:
            tensors, said = receive_tensors(ring.group, owner, HOST)
            copy = copy_of(owner, tensors, said)
            experts = ExpertCopy(shards_under(runtime, owner), copy)
            received = sum(tensor.nbytes for tensor in tensors.values())
        if runtime.epoch:  # as the job begins copies are made too, and no worker recovers
            runtime.reach("recovery-migrate")
    return Fresh(received, experts, True)


def copy_of(owner: int, tensors: Mapping[str, torch.Tensor], said: Mapping[str, Any]) -> PartCopy:
    """A copy of what an owner has sent.

    Args:
        tensors: of each range, by its number and their names.
        said: the places of ranges, in order, counts of steps, and a digest.

    Raises:
        RuntimeError: it is not what the owner has.
    """
    part = {where: Entry(place, {}) for where, place in places_said(said["places"]).items()}
    entries = list(part.values())
    for key, tensor in tensors.items():
        index, _, name = key.partition("/")
        entries[int(index)].tensors[name] = tensor
    if digest_of(part) != said["digest"]:
        raise RuntimeError(f"the copy of worker {owner}'s experts is not what worker {owner} has")
    return PartCopy(owner, part, max(said["steps"], default=None))


def copy_digests(runtime: Runtime, trained: Trained, experts: ExpertCopy | None) -> dict[str, str]:
    """Digests of the own experts and of those that this worker keeps a copy of: an owner and its keeper must agree."""
    if experts is None:
        return {}
    plan, worker = runtime.view.plan, runtime.worker
    coordinate = plan.coordinate_of(worker)
    assert coordinate is not None
    owners, (stage, tp_rank) = plan.grid.workers_at(coordinate), coordinate
    parts = {worker: expert_part(trained), experts.copy.owner: experts.copy.part}
    return {f"{stage}/{tp_rank}/{owners.index(owner)}/{len(owners)}": digest_of(part) for owner, part in parts.items()}
