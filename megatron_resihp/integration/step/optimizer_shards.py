# SPDX-License-Identifier: Apache-2.0
"""What a worker has of Megatron's distributed optimizer: its part of the state as ranges of flattened parameters.

May import megatron, `plan` and this package. A part has, of each parameter's range that it owns, the fp32 master and
what the optimizer keeps. Parameters are no state of their own: after each step they are what masters give when rounded.
Persistent buffers, such as the biases of routers, are whole on all holders of a shard, standbys included.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from megatron_resihp.executor.digest import digest_tensors
from megatron_resihp.integration.state.parameter_slices import lasting_names
from megatron_resihp.integration.state.shard import buffers_of, to_device
from megatron_resihp.integration.trained import Trained, parts_of
from megatron_resihp.plan.ranges import Range

MASTER = "param"
"""Megatron's name of the master among a range's tensors."""

Tensors = dict[str, torch.Tensor]
Place = tuple[int, int]
NOT_STEPPED: Final[Place] = (-1, -1)
"""The place of what no optimizer steps."""


@dataclass
class Entry:
    """A range's state.

    Attributes:
        place: the optimizer that steps it, of a chained one's parts, and its parameter group there; the same on all
            holders of a shard.
        tensors: MASTER and the optimizer's own by name, one-dimensional, and scalars such as a count of steps.
    """

    place: Place
    tensors: Tensors


Part = dict[Range, Entry]
"""The state of one worker's part."""


def own_part(trained: Trained) -> Part:
    """Views of the part that these objects step, sorted by range."""
    found = {}
    for index, part, parameter, where in _owned(trained):
        group, _ = part.model_param_group_index_map[parameter]
        tensors = part._get_main_param_and_optimizer_states(parameter)
        found[where] = Entry((index, group), {name: tensor.detach() for name, tensor in tensors.items()})
    return dict(sorted(found.items()))


def own_places(trained: Trained) -> dict[Range, Place]:
    """The ranges that these objects step, without their state."""
    owned = _owned(trained)
    return {where: (index, part.model_param_group_index_map[each][0]) for index, part, each, where in owned}


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
    for _, part, parameter, where in sorted(_owned(trained), key=lambda owned: owned[3]):
        group, order = part.model_param_group_index_map[parameter]
        gradient = part.optimizer.param_groups[group]["params"][order].grad
        assert gradient is not None and gradient.numel() == where.end - where.start
        gradients.append(gradient.detach().float().view(-1))
    return torch.cat(gradients) if gradients else torch.empty(0)


@torch.no_grad()
def fill_part(trained: Trained, state: Mapping[Range, Tensors], steps: Sequence[Any]) -> None:
    """Put a state into freshly built objects, whose optimizer has none yet; parameters are still to be gathered.

    Args:
        state: for each range that these objects own its tensors, on the host.
        steps: counts that some optimizers keep for each parameter group.
    """
    for _, part, parameter, where in _owned(trained):
        group, order = part.model_param_group_index_map[parameter]
        master = part.optimizer.param_groups[group]["params"][order]
        tensors = state[where]
        master.copy_(tensors[MASTER])
        # Scalars stay on the host, where torch's optimizers want them.
        kept = {name: to_device(tensor) if tensor.dim() else tensor.clone()
                for name, tensor in tensors.items() if name != MASTER}  # fmt: skip
        if kept:
            part.optimizer.state[master].update(kept)
    known = [step for step in steps if step is not None]
    for part in parts_of(trained.optimizer) if known else ():
        for parameters in part.optimizer.param_groups:
            parameters["step"] = max(known)


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
    chunks: list[Any] = list(trained.model)
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)  # also where Megatron would leave it to the next forward pass


@torch.no_grad()
def gather_parameters(trained: Trained) -> None:
    """Bring together the parameters that each replica has stepped; all working holders call it."""
    # Each part of a chained optimizer would gather those of all.
    part = next((part for part in parts_of(trained.optimizer) if not part.is_stub_optimizer), None)
    if part is not None:
        part.start_param_sync_for_bucket_group_subset()


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


def _owned(trained: Trained) -> Iterator[tuple[int, Any, torch.nn.Parameter, Range]]:
    """Each parameter of which these objects step something: the index of the optimizer and it, and the range."""
    names = {parameter: name for name, parameter in named_parameters(trained).items()}
    for index, part in enumerate(parts_of(trained.optimizer)):
        if part.is_stub_optimizer:
            continue
        for parameter in part.model_param_group_index_map:
            elements = part._get_model_param_range_map(parameter)["param"]
            yield index, part, parameter, Range(names[parameter], elements.start, elements.end)
