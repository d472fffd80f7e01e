# SPDX-License-Identifier: Apache-2.0
"""A worker's gradients and state by slices: summed with other holders, moved between unlike shards, digested.

May import megatron and this package. Used under a heterogeneous plan, and on the way into it and out of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.utils import get_model_config

from megatron_resihp.executor.digest import digest_tensors
from megatron_resihp.executor.groups.side_group import SideGroup
from megatron_resihp.executor.transfer import receive_tensors, send_tensors
from megatron_resihp.integration.state.expert_biases import TOKENS, named_counts, share_counts
from megatron_resihp.integration.state.parameter_slices import (
    Beside,
    Piece,
    States,
    counted_by_megatron,
    output_norms,
    pieces_of,
    whole_pieces,
)
from megatron_resihp.integration.state.shard import buffers_of, group_steps, put, set_steps, states_of
from megatron_resihp.integration.trained import Trained, parts_of
from megatron_resihp.integration.world.slice_shares import SliceShares
from megatron_resihp.plan import Shard
from megatron_resihp.plan.slices import NO_EXPERT, Move, Slice, expert_slices_of, plan_moves, slices_of

Shards = Mapping[int, Sequence[Shard]]


# ---- gradients


def sum_inside_stage(model: Sequence[Any]) -> None:
    """Sum the gradients that sequence parallelism splits, and counts of tokens, which it splits too; the members of a
    stage call it together."""
    peers, config = mpu.get_tensor_model_parallel_group(), get_model_config(model[0])
    _allreduce_non_tensor_model_parallel_grads(model, config, peers)
    if config.sequence_parallel:
        share_counts(model, lambda counts: dist.all_reduce(counts, group=peers), TOKENS)
        return
    # Each member has those of its own heads. Megatron sums these only with those that sequence parallelism splits.
    for norm in output_norms(model):
        for parameter in norm.parameters():
            dist.all_reduce(parameter.main_grad, group=peers)


def gradient_views(model: Sequence[Any], shares: SliceShares) -> dict[Slice, list[tuple[str, torch.Tensor]]]:
    """Each slice's gradients on this worker, as views into Megatron's buffers."""
    # A slice may have no parameter, as that of an embedding without positions.
    views: dict[Slice, list[tuple[str, torch.Tensor]]] = {piece: [] for piece in shares.slices}
    for piece in pieces_of(model, shares.own, shares.cuts, shares.tied_head) if shares.own else ():
        views[piece.slice].append((piece.name, piece.of(piece.parameter.main_grad)))
    return views


def summed_views(model: Sequence[Any], shares: SliceShares) -> dict[Slice, list[tuple[str, torch.Tensor]]]:
    """What the holders of each slice sum: its gradients, and the counts of its routers."""
    views = gradient_views(model, shares)
    for piece in whole_pieces(model, shares.own, shares.tied_head, named_counts) if shares.own else ():
        views[piece.slice].append((piece.name, piece.parameter))
    return views


def divide_by_tokens(model: Iterable[Any], everybody: SideGroup, own_tokens: float) -> None:
    """Divide gradients by the tokens that the losses of all workers were summed over; all members call it.

    Args:
        own_tokens: counted on this worker, 0 where a tensor-parallel peer before it counts the same.
    """
    tokens = torch.tensor([own_tokens], dtype=torch.float64)
    everybody.sum(tokens)
    for chunk in model:
        chunk.scale_gradients(1.0 / max(float(tokens), 1.0))


def counted_gradients(model: Sequence[Any], shares: SliceShares, own_degree: int) -> list[torch.Tensor]:
    """The gradients of the slices that this worker counts. `own_degree`: of tensor parallelism, in the job's layout."""
    views = gradient_views(model, shares)
    # A slice may be here twice, as word embeddings and as head: its copies are equal by now.
    return [
        counted_by_megatron(piece, name, view, shares.cuts, own_degree)
        for piece in sorted(shares.counted)
        for name, view in dict(views[piece]).items()
    ]


def counted_norm_squared(model: Sequence[Any], shares: SliceShares, own_degree: int) -> float:
    """Sum of squares of the gradients of the slices that this worker counts."""
    return _squares_of(counted_gradients(model, shares, own_degree))


def counted_parameters_squared(
    model: Sequence[Any], shares: SliceShares, own_degree: int, counts_masters: int
) -> float:
    """Sum of squares of the parameters of the slices that this worker counts.

    Args:
        own_degree: of tensor parallelism, in the job's layout.
        counts_masters: how often a master counts in the place of its parameter; 0: the parameter does, once.
    """
    # A slice may be here twice, as word embeddings and as head.
    counted: dict[tuple[Slice, str], torch.Tensor] = {}
    masters: dict[tuple[Slice, str], torch.Tensor] = {}
    for piece in pieces_of(model, shares.own, shares.cuts, shares.tied_head) if shares.own else ():
        if piece.slice in shares.counted:
            master = getattr(piece.parameter, "main_param", None) if counts_masters else None
            view = piece.of(piece.parameter.data if master is None else master.data)
            into = counted if master is None else masters
            into[piece.slice, piece.name] = counted_by_megatron(piece.slice, piece.name, view, shares.cuts, own_degree)
    return _squares_of(list(counted.values())) + counts_masters * _squares_of(list(masters.values()))


def _squares_of(tensors: Sequence[torch.Tensor]) -> float:
    if not tensors:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(tensor.float()) for tensor in tensors]).double()
    return float((norms * norms).sum())


def zeros_in(tensors: Iterable[torch.Tensor]) -> int:
    """How many elements are zero."""
    counts = [tensor.numel() - torch.count_nonzero(tensor) for tensor in tensors]
    return int(torch.stack(counts).sum()) if counts else 0


# ---- state


@dataclass(frozen=True)
class Redistribution:
    """Which shards every member holds, current to the last applied step, and which it wants in the new plan.

    Attributes:
        held, wanted: worker → shards.
        cuts: of both.
        tied_head: number of the head's layer if it has the word embeddings, too.
        shares: of each layer's experts, of both.
        copied: what the owners hold of whose experts a member has a copy, as current.
    """

    held: Shards
    wanted: Shards
    cuts: int
    tied_head: int | None
    shares: int = 1
    copied: Shards = field(default_factory=dict)


@dataclass
class WholeState:
    """The state of parameters, each one's as `states_of` gives it, and counts of steps as `group_steps` does."""

    states: dict[int, dict[str, torch.Tensor]]
    steps: Sequence[Any]


@dataclass
class Holding:
    """Training objects by slices.

    Args:
        trained: these objects.
        shards: what each chunk of the model holds.
        cuts, tied_head, shares: as of `Redistribution`.
        whole: the state of their parameters, if they have parts of it only, or none yet.
        beside: what else is here.
    """

    trained: Trained
    shards: Sequence[Shard]
    cuts: int
    tied_head: int | None
    shares: int = 1
    whole: WholeState | None = None
    beside: Beside | None = None

    @cached_property
    def pieces(self) -> dict[Slice, list[Piece]]:
        layout = self.cuts, self.tied_head, self.shares
        found: dict[Slice, list[Piece]] = {piece: [] for piece in slices_of(self.shards, *layout)}
        if self.shards:
            for piece in pieces_of(self.trained.model, self.shards, *layout):
                found[piece.slice].append(piece)
            for piece in whole_pieces(self.trained.model, self.shards, self.tied_head, buffers_of):
                found[piece.slice].append(piece)
        if self.beside is not None:
            found |= {piece: [] for piece in expert_slices_of(self.beside.shards, self.cuts, self.shares)}
            for piece in self.beside.pieces:
                found[piece.slice].append(piece)
        return found

    @property
    def states(self) -> States:
        own = states_of(self.trained) if self.whole is None else self.whole.states
        return own if self.beside is None else {**own, **self.beside.states}

    @property
    def steps(self) -> Sequence[Any]:
        """Counts of steps, of each parameter group."""
        return group_steps(self.trained) if self.whole is None else self.whole.steps

    def digests(self) -> dict[str, str]:
        """A digest of each slice of this state; holders of a slice must agree.

        Raises:
            RuntimeError: word embeddings and head, both held here, differ.
        """
        states, found = self.states, {}
        for piece, parts in sorted(self.pieces.items()):
            copies = {digest_tensors(_on_device(_state(states, [part for part in parts if part.chunk == chunk])))
                      for chunk in {part.chunk for part in parts}}  # fmt: skip
            if len(copies) > 1:
                raise RuntimeError("word embeddings and head differ, which should be the same")
            experts = () if piece.share == NO_EXPERT else (piece.share, self.shares)
            found["/".join(map(str, (piece.layer, piece.cut, self.cuts, *experts)))] = copies.pop() if copies else ""
        return found


def move_state(
    group: SideGroup, worker: int, old: Holding, new: Holding | None, shards: Redistribution,
    moved: Callable[[], None], filler: "Filler | None" = None,
) -> int:  # fmt: skip
    """Fill `new` with what its shards want, from the old objects and from other workers.

    Args:
        group: of all members; each of them calls this.
        worker: this worker's id.
        old: what this worker holds, as `shards.held` says.
        new: freshly built for what `shards.wanted` says of this worker; None if it wants nothing new.
        shards: every member's, before and after.
        moved: called after each transfer that this worker takes part in.
        filler: where the state goes, if not straight into `new`.

    Returns:
        the bytes received.
    """
    layout = shards.cuts, shards.tied_head, shards.shares
    holdings = {each: slices_of(own, *layout) for each, own in shards.held.items()}
    for each, owners in shards.copied.items():
        holdings[each] |= expert_slices_of(owners, shards.cuts, shards.shares)
    needs = {each: slices_of(own, *layout) for each, own in shards.wanted.items()}
    moves, missing = plan_moves(holdings, needs)
    if missing:
        raise RuntimeError(f"no worker holds {', '.join(map(str, sorted(missing)))}")
    states = old.states
    if new is not None:
        filler = filler or _Filler(new.trained)
        for piece in sorted(needs[worker] & holdings[worker]):
            filler.fill(new.pieces[piece], _state(states, old.pieces[piece]))
        filler.set_steps(old.steps)
    received = 0
    for move in moves:
        if move.source == worker:
            parts = {each: _state(states, old.pieces[each]) for each in move.slices}
            tensors = {f"{each}/{name}": view for each, views in parts.items() for name, view in views.items()}
            send_tensors(group, move.target, tensors, {"steps": old.steps})
        elif move.target == worker:
            assert filler is not None and new is not None
            received += _receive(group, move, filler, new.pieces, bool(old.trained.away))
        if worker in (move.source, move.target):
            moved()
    return received


def _state(states: States, pieces: Iterable[Piece]) -> dict[str, torch.Tensor]:
    """Name → the part of a tensor: parameters, masters, moments and buffers; scalars as they are."""
    found: dict[str, torch.Tensor] = {}
    for piece in pieces:
        for kind, tensor in states[id(piece.parameter)].items():
            sliced = piece.of(tensor) if tensor.shape == piece.parameter.shape else tensor
            found[f"{kind}/{piece.name}"] = sliced
    return found


def _receive(group: SideGroup, move: Move, filler: "Filler", target: Mapping[Slice, list[Piece]], to_host: bool) -> int:
    device = torch.device("cpu") if to_host else torch.device("cuda", torch.cuda.current_device())
    tensors, extra = receive_tensors(group, move.source, device)
    by_slice: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        layer, cut, name = key.split("/", 2)
        by_slice.setdefault(f"{layer}/{cut}", {})[name] = tensor
    for piece in move.slices:
        filler.fill(target[piece], by_slice.get(str(piece), {}))
    filler.set_steps(extra["steps"])
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class Filler(Protocol):
    """Puts slices of a state somewhere."""

    def fill(self, pieces: Iterable[Piece], tensors: Mapping[str, torch.Tensor]) -> None: ...

    def set_steps(self, steps: Sequence[Any]) -> None:
        """Step counters that an optimizer keeps per parameter group. They are equal in all groups that count; those of
        Muon don't, and keep what an earlier change has set."""


class HostFiller:
    """Puts them together in host memory."""

    def __init__(self) -> None:
        self.whole = WholeState({}, [])

    def fill(self, pieces: Iterable[Piece], tensors: Mapping[str, torch.Tensor]) -> None:
        for piece in pieces:
            parameter, state = piece.parameter, self.whole.states.setdefault(id(piece.parameter), {})
            for name, tensor in tensors.items():
                kind = name.removesuffix(f"/{piece.name}")
                if kind == name:
                    continue
                if not tensor.dim():
                    state[kind] = tensor.detach().cpu().clone()
                    continue
                if kind not in state:
                    state[kind] = torch.empty(parameter.shape, dtype=tensor.dtype)
                piece.of(state[kind]).copy_(tensor)

    def set_steps(self, steps: Sequence[Any]) -> None:
        self.whole.steps = [*self.whole.steps, *steps]


def _on_device(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All but scalars on the device: a digest also says which tensors are together."""
    device = torch.device("cuda", torch.cuda.current_device())
    return {
        name: tensor.cpu() if not tensor.dim() else tensor if tensor.is_cuda else tensor.to(device)
        for name, tensor in tensors.items()
    }


class _Filler:
    """Puts slices of a state into freshly built objects, whose optimizer has no state yet."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._inner = {
            id(p): part.optimizer
            for part in parts_of(trained.optimizer)
            if not part.is_stub_optimizer
            for group in part.optimizer.param_groups
            for p in group["params"]
        }

    @torch.no_grad()
    def fill(self, pieces: Iterable[Piece], tensors: Mapping[str, torch.Tensor]) -> None:
        for piece in pieces:
            parameter = piece.parameter
            master = getattr(parameter, "main_param", None)
            key = parameter if master is None else master
            for name, tensor in tensors.items():
                kind, _, rest = name.partition("/")
                if kind == "state":
                    item, _, rest = rest.partition("/")
                if rest != piece.name:
                    continue
                if kind in ("param", "buffer"):
                    put(piece.of(parameter.data), tensor)
                elif kind == "master":
                    put(piece.of(key.data), tensor)
                else:
                    self._fill_moment(piece, key, item, tensor)

    def _fill_moment(self, piece: Piece, key: torch.Tensor, item: str, tensor: torch.Tensor) -> None:
        state = self._inner[id(key)].state[key]
        if not tensor.dim():
            state[item] = tensor.clone()
            return
        if item not in state:
            state[item] = torch.empty_like(key, dtype=tensor.dtype)
        put(piece.of(state[item]), tensor)

    def set_steps(self, steps: Sequence[Any]) -> None:
        """Step counters that an optimizer keeps per parameter group; they are equal in all groups."""
        set_steps(self._trained, steps)


def slice_states(
    trained: Trained, shards: Sequence[Shard], cuts: int, tied_head: int | None
) -> dict[Slice, dict[str, torch.Tensor]]:
    """All that these objects hold, as views by slice; where both are here, word embeddings and head are one."""
    holding = Holding(trained, shards, cuts, tied_head)
    states = holding.states
    return {piece: _state(states, parts) for piece, parts in holding.pieces.items()}
