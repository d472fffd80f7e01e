# SPDX-License-Identifier: Apache-2.0
"""A shard's optimizer state put together from its parts, and shared out again: into heterogeneous plans and back.

Under a heterogeneous plan every holder of a slice has all of its state, so that it can move by slices. On the way there
the holders of a shard put it together in host memory, on the way back each cuts what it needs out of it. May import
megatron and this package.
"""

from collections.abc import Iterable, Mapping

import torch

from megatron_resihp.executor.transfer import tell_all
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.shard import buffer_states, buffers_of, group_steps, states_of
from megatron_resihp.integration.state.slice_state import WholeState
from megatron_resihp.integration.step.optimizer_buddies import (
    Collected,
    current_part,
    full_names,
    make_moves,
    places_said,
    shards_under,
    steps_of,
)
from megatron_resihp.integration.step.optimizer_copy import Kept, PartCopy
from megatron_resihp.integration.step.optimizer_shards import (
    MASTER,
    NOT_STEPPED,
    STATE,
    Entry,
    Tensors,
    digest_of_pieces,
    fill_part,
    named_parameters,
    own_part,
    own_places,
    publish_parameters,
    shaped,
)
from megatron_resihp.integration.trained import Trained
from megatron_resihp.plan.ranges import Range, plan_range_moves


def are_there_parts(runtime: Runtime) -> bool:
    """Whether the state comes from an epoch in which it was shared out; all members call it."""
    return any(tell_all(runtime.mode.everybody, runtime.worker, runtime.held.kept is not None).values())


def put_together(runtime: Runtime) -> tuple[int, WholeState]:
    """The whole state of the shard that this worker has a part of; all members call it.

    Returns:
        the bytes received, and the state by the live objects' parameters; none where there is no part here.

    Raises:
        RuntimeError: a part and its copy are both gone.
    """
    kept, worker = runtime.held.kept, runtime.worker
    members = runtime.job.own.expert_members
    has = current_part(runtime.held.live, kept, members)
    parameters: dict[Range, torch.nn.Parameter] = {}
    if kept is not None:
        named = named_parameters(runtime.held.live)
        bare = {Range(name, 0, parameter.numel()): parameter for name, parameter in named.items()}
        names = full_names(kept.coordinate, dict.fromkeys(bare, NOT_STEPPED), members)
        parameters = dict(zip(names, bare.values(), strict=True))
    told = tell_all(runtime.mode.everybody, worker, {"has": list(has), "needs": list(parameters)})
    holdings, wanted = ({each: [Range(*where) for where in said[what]] for each, said in told.items()}
                        for what in ("has", "needs"))  # fmt: skip
    moves, missing = plan_range_moves(holdings, wanted)
    if missing:
        raise RuntimeError(f"no worker holds the optimizer's state of {missing[0]}")
    collected = Collected(wanted[worker], steps_of(runtime))
    received = make_moves(runtime, moves, has, collected)
    collected.check()
    collected.compare(collected.tensors)
    states = {id(parameter): shaped(parameter, collected.tensors[where]) for where, parameter in parameters.items()}
    if kept is not None:
        states |= buffer_states(runtime.held.live.model)
    return received, WholeState(states, collected.steps)


def parameters_and_buffers(trained: Trained) -> WholeState:
    """What all working holders of a shard have whole, whichever parts of the optimizer's state they have."""
    parameters = {id(each): {"param": each.data} for each in named_parameters(trained).values()}
    return WholeState(parameters | buffer_states(trained.model), ())


def share_out(runtime: Runtime, trained: Trained, whole: WholeState, owner: int | None) -> Kept | None:
    """Fill new objects' own parts, gather parameters, and keep a copy; all members call it.

    Args:
        trained: what this worker has now: new objects, or those of the epoch before where it stands by.
        whole: the state of all parameters of the new objects.
        owner: of the part that it keeps a copy of; None: it keeps none.
    """
    plan, worker = runtime.view.plan, runtime.worker
    coordinate = plan.coordinate_of(worker)
    owns = own_places(trained) if runtime.view.works else {}
    told = tell_all(runtime.mode.everybody, worker, list(owns.items()))
    if not runtime.view.works:
        whole = WholeState(states_of(trained), group_steps(trained))
    if coordinate is None:
        return None
    steps = [step for step in whole.steps if step is not None]
    parameters = named_parameters(trained)
    if runtime.view.works:
        cut = _cut(parameters, whole, owns)
        fill_part(trained, cut, steps)
        _fill_buffers(trained, whole)
        # That all of the state is what it was before it moved is known by slice.
        now = {where: entry.tensors for where, entry in own_part(trained).items()}
        if digest_of_pieces(now[where] for where in cut) != digest_of_pieces(cut.values()):
            raise RuntimeError("this worker's part of the optimizer's state is not what it was before it moved")
        publish_parameters(trained)
    if owner is None:
        return Kept(coordinate, runtime.view.works, None)
    places = places_said(told[owner])
    part = {where: Entry(places[where], tensors) for where, tensors in _cut(parameters, whole, sorted(places)).items()}
    copy = PartCopy(owner, part, max(steps, default=None))
    return Kept(coordinate, runtime.view.works, copy, shards_under(runtime, owner))


@torch.no_grad()
def _fill_buffers(trained: Trained, whole: WholeState) -> None:
    for chunk in trained.model:
        for _, buffer in buffers_of(chunk):
            buffer.copy_(whole.states[id(buffer)]["buffer"])


def _cut(
    parameters: Mapping[str, torch.nn.Parameter], whole: WholeState, ranges: Iterable[Range]
) -> dict[Range, Tensors]:
    """Ranges out of whole states, in host memory of their own."""
    found = {}
    for where in ranges:
        state = whole.states[id(parameters[where.name])]
        flat = {MASTER: state.get("master", state["param"])}
        flat |= {name.removeprefix(STATE): tensor for name, tensor in state.items() if name.startswith(STATE)}
        found[where] = {
            name: (tensor.detach().reshape(-1)[where.start : where.end] if tensor.dim() else tensor).cpu().clone()
            for name, tensor in flat.items()
        }
    return found
