# SPDX-License-Identifier: Apache-2.0
"""A worker's part of the optimizer's state as ranges of flattened parameters: what it has of Megatron's distributed
optimizers, or, of optimizers that aren't, the experts.

May import megatron, `plan` and this package. A part has, of each parameter's range that it owns, the fp32 master and
what the optimizer keeps. Parameters are no state of their own: after each step they are what masters give when rounded.
The layer-wise distributed optimizer owns whole parameters, because Muon steps each of them as a matrix.
Persistent buffers, such as the biases of routers, are whole on all holders of a shard, standbys included.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from megatron_resihp.executor.digest import digest_tensors
from megatron_resihp.integration.state.parameter_slices import EXPERT, lasting_names
from megatron_resihp.integration.state.shard import buffers_of, set_steps, to_device
from megatron_resihp.integration.trained import Trained, parts_of, takes_matrices
from megatron_resihp.plan.ranges import Range

MASTER = "param"
"""Megatron's name of the master among a range's tensors."""

STATE = "state/"
"""Before the names of what an optimizer keeps, where a parameter's own tensors are beside it."""
Tensors = dict[str, torch.Tensor]
MARKS: Final = ("is_qkv", "qkv_split_shapes")
"""Attributes of a master that say how Muon takes it apart; those that Megatron has set."""


class Matrix(NamedTuple):
    """A master that is stepped as a matrix.

    Attributes:
        shape: of it.
        marks: of MARKS, with their values.
    """

    shape: tuple[int, ...]
    marks: dict[str, Any]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """A flattened master or gradient as its optimizer wants it."""
        found = flat.view(self.shape)
        vars(found).update(self.marks)
        return found


class Place(NamedTuple):
    """Where a range is stepped; the same on all holders of a shard.

    Attributes:
        optimizer: of a chained one's parts.
        group: its parameter group there.
        matrix: what it is if it is stepped as a matrix; None: number by number.
    """

    optimizer: int
    group: int
    matrix: Matrix | None = None


NOT_STEPPED: Final = Place(-1, -1)
"""The place of what no optimizer steps."""


@dataclass
class Entry:
    """A range's state.

    Attributes:
        place: where it is stepped.
        tensors: MASTER and the optimizer's own by name, one-dimensional, and scalars such as a count of steps.
    """

    place: Place
    tensors: Tensors


Part = dict[Range, Entry]
"""The state of one worker's part."""


def own_part(trained: Trained) -> Part:
    """Views of the part that these objects step, sorted by range."""
    return _as_part(_owned(trained))


def expert_part(trained: Trained) -> Part:
    """The same of experts only."""
    return _as_part(_experts(trained))


def _as_part(owns: Iterable["_Owned"]) -> Part:
    found = {}
    for owned in owns:
        tensors = {name: tensor.detach().view(-1) if tensor.dim() else tensor.detach()
                   for name, tensor in _tensors(owned).items()}  # fmt: skip
        found[owned.where] = Entry(owned.place, tensors)
    return dict(sorted(found.items()))


def own_places(trained: Trained) -> dict[Range, Place]:
    """The ranges that these objects step, without their state."""
    return {owned.where: owned.place for owned in _owned(trained)}


def whole_buffers(trained: Trained) -> Part:
    """Views of persistent buffers, as ranges with one tensor each."""
    return {
        Range(f"{chunk}/{name}", 0, buffer.numel()): Entry(NOT_STEPPED, {MASTER: buffer.detach().view(-1)})
        for chunk, module in enumerate(trained.model)
        for name, buffer in buffers_of(module)
    }


def own_gradient(trained: Trained) -> torch.Tensor:
    """The summed gradient of the own part, range by range in order, where it was; after `ready_gradients`."""
    gradients = []
    for owned in sorted(_owned(trained), key=lambda owned: owned.where):
        gradient = owned.master.grad
        assert gradient is not None and gradient.numel() == owned.where.end - owned.where.start
        gradients.append(gradient.detach().float().view(-1))
    return torch.cat(gradients) if gradients else torch.empty(0)


def expert_gradients(trained: Trained) -> list[torch.Tensor]:
    """The summed gradients of whole experts, where Megatron has them, one for each range of `expert_part` in order."""
    parameters: list[Any] = [owned.parameter for owned in sorted(_experts(trained), key=lambda owned: owned.where)]
    return [parameter.main_grad.detach() for parameter in parameters]


@torch.no_grad()
def fill_part(trained: Trained, state: Mapping[Range, Tensors], steps: Sequence[Any]) -> None:
    """Put a state into freshly built objects, whose optimizer has none yet; parameters are still to be gathered.

    Args:
        state: for each range that these objects own its tensors, on the host.
        steps: counts that some optimizers keep for each parameter group.
    """
    for owned in _owned(trained):
        master, tensors = owned.master, state[owned.where]
        master.copy_(tensors[MASTER].view(master.shape))
        # Scalars stay on the host, where torch's optimizers want them.
        kept = {name: to_device(tensor.view(master.shape)) if tensor.dim() else tensor.clone()
                for name, tensor in tensors.items() if name != MASTER}  # fmt: skip
        if kept:
            owned.part.optimizer.state[master].update(kept)
    set_steps(trained, steps)


def shaped(parameter: torch.Tensor, tensors: Tensors) -> Tensors:
    """A whole parameter's state as an optimizer that has all of it says it (`states_of`).

    Args:
        parameter: of this shape and type.
        tensors: as of `Entry`.
    """
    master = tensors[MASTER].view(parameter.shape)
    state = {"param": master.to(parameter.dtype)}
    if parameter.dtype != master.dtype:
        state["master"] = master
    for name, tensor in tensors.items():
        if name != MASTER:
            state[STATE + name] = tensor.view(parameter.shape) if tensor.dim() else tensor
    return state


@torch.no_grad()
def fill_buffers(trained: Trained, state: Mapping[Range, Tensors]) -> None:
    """Put persistent buffers into freshly built objects. `state`: as `whole_buffers` gives it, on the host."""
    for where, entry in whole_buffers(trained).items():
        entry.tensors[MASTER].copy_(state[where][MASTER])


@torch.no_grad()
def publish_parameters(trained: Trained) -> None:
    """Round the masters into the parameters and gather those of all replicas; all working holders call it."""
    for part in parts_of(trained.optimizer):
        part._copy_main_params_to_model_params()
    layer_wise = _layer_wise(trained.optimizer)
    if layer_wise is not None and not layer_wise.use_buffer_param_sync:
        layer_wise.allgather_params()
        return
    chunks: list[Any] = list(trained.model)
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)  # also where Megatron would leave it to the next forward pass


@torch.no_grad()
def gather_parameters(trained: Trained) -> None:
    """Bring together the parameters that each replica has stepped; all working holders call it."""
    layer_wise = _layer_wise(trained.optimizer)
    if layer_wise is not None and not layer_wise.use_buffer_param_sync:
        layer_wise.allgather_params()
        return
    # Each part of a chained optimizer would gather those of all.
    parts = (part for part in parts_of(trained.optimizer) if _steps_ranges(part))
    part = next((part for part in parts if not part.is_stub_optimizer), None)
    for each in (layer_wise, part):
        if each is not None:
            each.start_param_sync_for_bucket_group_subset()


def _layer_wise(optimizer: Any) -> Any:
    """The optimizer that shares out whole parameters; None: there is none. Its parameters may be in buffers of
    Megatron's own, which are gathered as those of the distributed optimizer, or outside of any."""
    chained = (optimizer, *getattr(optimizer, "chained_optimizers", ()))
    return next((each for each in chained if hasattr(each, "use_buffer_param_sync")), None)


def start_gathering_first_chunk(trained: Trained) -> None:
    """Have the parameters of the first chunk sent, where Megatron doesn't leave that to the next forward pass."""
    first: Any = trained.model[0]
    first.start_param_sync(force_dispatch=True)


def step_part(part: Any) -> None:
    """Megatron's step of the own part without what follows it, the gathering of parameters: it communicates nothing."""
    MixedPrecisionOptimizer.step_with_ready_grads(part)


def digest_of(part: Mapping[Range, Entry]) -> str:
    """A digest of masters and of what the optimizer keeps; the owner of a part and its buddy must agree.

    Computed on the device, range by range: a copy is in host memory, which is slow, and too large for the device.
    """
    total = hashlib.sha256()
    for where, entry in part.items():
        total.update(f"{where.name} {where.start} {where.end} {_digest_on_device(entry.tensors)}\n".encode())
    return total.hexdigest()[:16]


def digest_of_pieces(pieces: Iterable[Tensors]) -> str:
    """The same digest of pieces of ranges, on any device."""
    return hashlib.sha256("\n".join(map(_digest_on_device, pieces)).encode()).hexdigest()[:16]


def _digest_on_device(tensors: Tensors) -> str:
    device = torch.device("cuda", torch.cuda.current_device())
    moved = {name: tensor.to(device) if tensor.dim() else tensor.cpu() for name, tensor in tensors.items()}
    return digest_tensors(moved)


def digest_of_parameters(model: Iterable[torch.nn.Module]) -> str:
    """A digest of a whole shard's parameters, which all of its working holders have."""
    return digest_tensors({f"{chunk}/{name}": parameter.data for chunk, module in enumerate(model)
                           for name, parameter in module.named_parameters()})  # fmt: skip


def named_parameters(trained: Trained) -> dict[str, torch.nn.Parameter]:
    """Those of all chunks, by the names that ranges have."""
    return {
        f"{chunk}/{name}": parameter
        for chunk, module in enumerate(trained.model)
        for name, parameter in lasting_names(module)
    }


class _Owned(NamedTuple):
    """A range that these objects step."""

    part: Any
    place: Place
    parameter: torch.nn.Parameter
    master: torch.Tensor
    where: Range


def _owned(trained: Trained) -> Iterator[_Owned]:
    named = named_parameters(trained)
    for index, part in enumerate(parts_of(trained.optimizer)):
        if not part.is_stub_optimizer:
            yield from (_owned_ranges if _steps_ranges(part) else _owned_whole)(index, part, named)


def _experts(trained: Trained) -> Iterator[_Owned]:
    return (owned for owned in _owned(trained) if EXPERT.search(owned.where.name))


def _steps_ranges(part: Any) -> bool:
    """Whether it is Megatron's distributed optimizer, which owns a range of the elements of all parameters."""
    return hasattr(part, "model_param_group_index_map")


def _owned_ranges(index: int, part: Any, named: Mapping[str, torch.nn.Parameter]) -> Iterator[_Owned]:
    names = {parameter: name for name, parameter in named.items()}
    for parameter, (group, order) in part.model_param_group_index_map.items():
        elements = part._get_model_param_range_map(parameter)["param"]
        master = part.optimizer.param_groups[group]["params"][order]
        where = Range(names[parameter], elements.start, elements.end)
        yield _Owned(part, Place(index, group), parameter, master, where)


def _owned_whole(index: int, part: Any, named: Mapping[str, torch.nn.Parameter]) -> Iterator[_Owned]:
    names = {id(getattr(parameter, "main_param", parameter)): name for name, parameter in named.items()}
    for group, parameters in enumerate(part.optimizer.param_groups):
        for master in parameters["params"]:
            name, matrix = names[id(master)], _matrix(master) if takes_matrices(part) else None
            where = Range(name, 0, master.numel())
            yield _Owned(part, Place(index, group, matrix), named[name], master, where)


def _matrix(master: torch.Tensor) -> Matrix:
    return Matrix(tuple(master.shape), {mark: getattr(master, mark) for mark in MARKS if hasattr(master, mark)})


def _tensors(owned: _Owned) -> Tensors:
    """MASTER and what the optimizer keeps, in their own shapes."""
    if _steps_ranges(owned.part):
        found: Tensors = owned.part._get_main_param_and_optimizer_states(owned.parameter)
        return found
    kept = owned.part.optimizer.state.get(owned.master, {})
    return {MASTER: owned.master, **{name: each for name, each in kept.items() if isinstance(each, torch.Tensor)}}
