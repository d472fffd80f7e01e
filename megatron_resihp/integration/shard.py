"""A worker's shard as named tensors, and a freshly built model and optimizer filled with one.

May import torch and this room. Names are Megatron's parameter names, so they agree between holders of a shard.
"""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_resihp.executor.digest import digest_tensors
from megatron_resihp.integration.runtime import Runtime, Trained
from megatron_resihp.integration.step import parts


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
        tensors.update({f"buffer/{chunk}/{name}": buffer for name, buffer in model.named_buffers()})
    return tensors


def record_digest(runtime: Runtime) -> None:
    """Write a digest of the state that this worker holds to the event log, if that is asked for."""
    if runtime.config.resihp_record_digests and runtime.trained is not None:
        digest = digest_tensors(shard_tensors(runtime.trained))
        runtime.control.event("digest", shard=runtime.held, iteration=runtime.progress.iteration, digest=digest)


def native_digests(runtime: Runtime, trained: Trained) -> dict[str, str]:
    """The digest of the shard that the plan gives this worker or lets it keep, by its coordinate."""
    coordinate = runtime.current_plan.coordinate_of(runtime.worker)
    if coordinate is None:
        return {}
    return {f"{coordinate.stage}/{coordinate.tp_rank}": digest_tensors(shard_tensors(trained))}


def group_steps(trained: Trained) -> list[Any]:
    """Step counters that optimizers such as Apex's keep per parameter group instead of per parameter."""
    return [group.get("step") for part in parts(trained.optimizer) for group in part.optimizer.param_groups]


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
            parameter.data.copy_(tensors[f"param/{name}"])
            master = getattr(parameter, "main_param", None)
            if master is not None:
                master.data.copy_(tensors[f"master/{name}"])
            state.update(states.get(name, {}))
        for chunk, model in enumerate(trained.model):
            for name, buffer in model.named_buffers():
                buffer.copy_(tensors[f"buffer/{chunk}/{name}"])
    groups = [group for part in parts(trained.optimizer) for group in part.optimizer.param_groups]
    for group, step in zip(groups, steps, strict=True):
        if step is not None:
            group["step"] = step


def _parameters(trained: Trained) -> Iterator[tuple[str, torch.nn.Parameter, dict[str, Any]]]:
    """Each trained parameter with its name and the optimizer's state for it."""
    inner = [part.optimizer for part in parts(trained.optimizer) if not part.is_stub_optimizer]
    owned = {id(p): optimizer for optimizer in inner for group in optimizer.param_groups for p in group["params"]}
    for chunk, model in enumerate(trained.model):
        for name, parameter in model.named_parameters():
            key = getattr(parameter, "main_param", None)
            key = parameter if key is None else key
            if id(key) in owned:
                yield f"{chunk}/{name}", parameter, owned[id(key)].state[key]
