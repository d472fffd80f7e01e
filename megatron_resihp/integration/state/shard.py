# SPDX-License-Identifier: Apache-2.0
"""A worker's shard as named tensors, and a freshly built model and optimizer filled with one.

May import torch and this package. Names are Megatron's parameter names, so they agree between holders of a shard.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_resihp.integration.trained import Trained, parts_of, takes_matrices


def shard_tensors(trained: Trained) -> dict[str, torch.Tensor]:
    """Everything that the optimizer step changes: parameters, fp32 masters, moments, and persistent buffers."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter, state in _parameters(trained):
        tensors[f"param/{name}"] = parameter.data
        master = getattr(parameter, "main_param", None)
        if master is not None:
            tensors[f"master/{name}"] = master.data
        tensors.update({f"state/{name}/{key}": v for key, v in state.items() if isinstance(v, torch.Tensor)})
    for chunk, model in enumerate(trained.model):
        tensors.update({f"buffer/{chunk}/{name}": buffer for name, buffer in buffers_of(model)})
    return tensors


def group_steps(trained: Trained) -> list[Any]:
    """Step counters that optimizers such as Apex's keep per parameter group instead of per parameter."""
    return [group.get("step") for part in parts_of(trained.optimizer) for group in part.optimizer.param_groups]


def set_steps(trained: Trained, steps: Sequence[Any]) -> None:
    """Set what `group_steps` counts, the same in all groups, in optimizers that count."""
    known = [step for step in steps if step is not None]
    for part in parts_of(trained.optimizer) if known else ():
        for group in () if takes_matrices(part) else part.optimizer.param_groups:
            group["step"] = max(known)


def align_steps(optimizer: Any) -> None:
    """Give groups in which this worker has no parameters the count of the others, before it writes them. Optimizers
    that count by group pass them over, and what one worker writes of groups is read by all.
    """
    parts = [part for part in parts_of(optimizer) if not takes_matrices(part)]
    groups = [group for part in parts for group in part.optimizer.param_groups]
    known = [group["step"] for group in groups if group["params"] and "step" in group]
    for group in groups if known else ():
        if not group["params"]:
            group["step"] = max(known)


def fill_shard(trained: Trained, tensors: dict[str, torch.Tensor], steps: list[Any]) -> None:
    """Put a shard's state into freshly built objects of the same coordinate. Parameters are copied, moments are kept.

    Raises:
        KeyError: if a parameter has no tensor; the two were built for different coordinates.
    """
    states: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "state":
            name, _, item = rest.rpartition("/")
            states.setdefault(name, {})[item] = tensor
    with torch.no_grad():
        for name, parameter, state in _parameters(trained):
            put(parameter.data, tensors[f"param/{name}"])
            master = getattr(parameter, "main_param", None)
            if master is not None:
                put(master.data, tensors[f"master/{name}"])
            state.update(states.get(name, {}))
        for chunk, model in enumerate(trained.model):
            for name, buffer in buffers_of(model):
                buffer.copy_(tensors[f"buffer/{chunk}/{name}"])
    groups = [group for part in parts_of(trained.optimizer) for group in part.optimizer.param_groups]
    for group, step in zip(groups, steps, strict=True):
        if step is not None:
            group["step"] = step


def put(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, if they are not the same memory: the old state is not written to."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def with_moments_on_device(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a shard, some or all in host memory, fit for new objects that keep its moments."""
    return {name: to_device(tensor) if name.startswith("state/") and tensor.dim() and not tensor.is_cuda else tensor
            for name, tensor in tensors.items()}  # fmt: skip


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device."""
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)


def states_of(trained: Trained) -> dict[int, dict[str, torch.Tensor]]:
    """For each trained parameter, by identity, all that the optimizer step changes of it: "param", "master" and
    "state/…" for what the optimizer keeps. Persistent buffers are there, too."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for _, parameter, state in _parameters(trained):
        tensors = {"param": parameter.data}
        master = getattr(parameter, "main_param", None)
        if master is not None:
            tensors["master"] = master.data
        tensors |= {f"state/{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
        found[id(parameter)] = tensors
    return found | buffer_states(trained.model)


def buffer_states(model: Sequence[torch.nn.Module]) -> dict[int, dict[str, torch.Tensor]]:
    """The same for persistent buffers: "buffer"."""
    return {id(buffer): {"buffer": buffer} for chunk in model for _, buffer in buffers_of(chunk)}


def buffers_of(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A chunk's persistent buffers, such as the biases of routers. What others hold counts within an iteration only, or
    is computed anew with each model."""
    for path, module in chunk.named_modules():
        for name, buffer in module._buffers.items():  # most modules have none
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _parameters(trained: Trained) -> Iterator[tuple[str, torch.nn.Parameter, dict[str, Any]]]:
    """Each trained parameter with its name and the optimizer's state for it."""
    inner = [part.optimizer for part in parts_of(trained.optimizer) if not part.is_stub_optimizer]
    owned = {id(p): optimizer for optimizer in inner for group in optimizer.param_groups for p in group["params"]}
    for chunk, model in enumerate(trained.model):
        for name, parameter in model.named_parameters():
            key = getattr(parameter, "main_param", None)
            key = parameter if key is None else key
            if id(key) in owned:
                yield f"{chunk}/{name}", parameter, owned[id(key)].state[key]
