# SPDX-License-Identifier: Apache-2.0
"""Modules' extra state between workers: to those without work in each iteration, to new holders in a new epoch.

May import megatron, `plan`, `executor` and this package.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from megatron_resihp.executor.transfer import receive_tensors, send_tensors
from megatron_resihp.integration.modes.migration import with_those_after
from megatron_resihp.integration.progress import ContractBroken
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.extra_state import Layers, bearers_of, collected, extra_digests, put_back
from megatron_resihp.integration.trained import Trained
from megatron_resihp.plan import ParallelPlan, Shard
from megatron_resihp.plan.slices import WHOLE, Move, Slice, all_shards, plan_moves
from megatron_resihp.plan.spelling import spelled_out
from megatron_resihp.protocol.published import EpochPlan

HOST = torch.device("cpu")


def share_extra_state(runtime: Runtime) -> None:
    """What this iteration's forward passes have made of it, also for workers without work; all members call it."""
    held, plan = runtime.held, runtime.view.plan
    extra = held.extra
    if runtime.view.works:
        extra.pending = extra.collect(held.live.model, held.shards)
    if not plan.standbys or not held.shards:
        return
    layers = extra.layers(held.live.model, held.shards)
    if not layers:
        return
    if extra.moves is None or extra.moves[0] is not plan:
        extra.moves = plan, moves_to_standbys(spelled_out(plan, runtime.job.own.chunks))
    received = _make(runtime, extra.moves[1], extra.pending, layers)
    if not runtime.view.works:
        extra.pending = received


def move_extra_state(runtime: Runtime, order: EpochPlan, trained: Trained) -> dict[str, str]:
    """Give each member what its modules had after the last step; all members call it.

    Args:
        trained: the new objects, which are filled, or the live ones.

    Returns:
        digests of what this worker had and has.

    Raises:
        ContractBroken: what it has kept isn't what it was.
    """
    held, worker = runtime.held, runtime.worker
    wanted = all_shards(spelled_out(order.plan, runtime.job.own.chunks))
    needs = _by_layers(wanted)
    moves, _ = plan_moves(_by_layers(order.held), needs)
    before, bearers = held.extra.current, list(bearers_of(trained.model, wanted[worker])) if runtime.view.works else []
    layers = {bearer.layer for bearer in bearers}
    if held.shards:
        layers |= held.extra.layers(held.live.model, held.shards)
    known = {**before, **_make(runtime, moves, before, layers)}
    after = {layer: states for layer, states in known.items() if Slice(layer, WHOLE) in needs[worker]}
    digests = extra_digests(after)
    if trained is not held.live:
        put_back(bearers, after)
        if extra_digests(collected(bearers)) != digests:
            raise ContractBroken("the extra state of some module is not what it was given")
    held.extra.pending = after
    return with_those_after(extra_digests(before), digests)


def moves_to_standbys(plan: ParallelPlan) -> list[Move]:
    """From a worker that works on a layer to each one that only keeps it. `plan`: says its layers."""
    shards = _by_layers(all_shards(plan))
    working = {worker: shards[worker] for worker in plan.working}
    return plan_moves(working, {worker: shards[worker] for worker in plan.standbys})[0]


def _by_layers(shards: Mapping[int, Sequence[Shard]]) -> dict[int, frozenset[Slice]]:
    """The layers of each worker: what it has of one doesn't depend on its cuts."""
    return {
        worker: frozenset(Slice(layer, WHOLE) for shard in own for layer in range(shard.first, shard.end))
        for worker, own in shards.items()
    }


def _make(runtime: Runtime, moves: Iterable[Move], own: Layers, layers: Collection[int]) -> Layers:
    """Make the moves that this worker takes part in.

    Args:
        own: what it has.
        layers: that may have any, as all that hold one say alike; nothing is sent of others.

    Returns:
        what it has received.
    """
    group, worker, received = runtime.mode.everybody, runtime.worker, dict[int, dict[str, torch.Tensor]]()
    for move in moves:
        moved = [piece.layer for piece in move.slices if piece.layer in layers]
        if not moved:
            continue
        if move.source == worker:
            states = {f"{layer}/{name}": each for layer in moved for name, each in own.get(layer, {}).items()}
            send_tensors(group, move.target, states, {})
        elif move.target == worker:
            for key, state in receive_tensors(group, move.source, HOST)[0].items():
                layer, _, name = key.partition("/")
                received.setdefault(int(layer), {})[name] = state
    return received
