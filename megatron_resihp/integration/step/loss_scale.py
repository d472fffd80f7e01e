# SPDX-License-Identifier: Apache-2.0
"""The loss scale of training in half precision: losses are multiplied by it, and the gradients divided by it again.

Megatron divides and looks for overflows on each worker, reduces what it has found over a group of the uniform grid, and
moves the scale, all before the step. Here the agreement tells whether a gradient has overflowed, and a worker that
steps divides once, after it; one that doesn't step moves the scale too, so that all have the same (DESIGN contract 3).

A micro-batch's loss is multiplied by what Megatron multiplies it by under the job's own layout, whatever the plan: or
other iterations would overflow after a change of plan than without it. What a plan's sums then lack is made up for in
the division. Where sums are 16 bits wide, too, it is they that overflow first, so a replica's sum of losses stays their
mean: a loss is multiplied by what Megatron would multiply it by with as many replicas as the plan has. May import
megatron and this package.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_resihp.integration.trained import parts_of


@dataclass(frozen=True)
class Averaging:
    """By what losses and sums of gradients are divided under a plan.

    Attributes:
        per_token: whether the job averages over tokens, not over micro-batches.
        micro_batches: of the global batch.
        first_replicas: by whose number a scaled loss is multiplied: those of the job's own layout, or the plan's.
        replicas: by which Megatron divides sums of gradients; 1 where it doesn't.
        weight: by what this worker's losses are multiplied, beside all workers': above 1 where fewer replicas share its
            sequences than others', since each divides its losses by its own tokens.
    """

    per_token: bool
    micro_batches: int
    first_replicas: float
    replicas: float
    weight: float = 1.0


def scales_losses(optimizer: Any) -> bool:
    """Whether gradients are those of scaled losses: with --fp16, or with a constant --loss-scale."""
    return bool(_scalers(optimizer))


def scale_of(optimizer: Any) -> dict[str, Any]:
    """The scale and what tells when it moves next, as numbers; nothing if it never does."""
    state: dict[str, Any] = next((scaler.state_dict() for scaler in _scalers(optimizer)), {})
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def restore_scale(optimizer: Any, state: dict[str, Any]) -> None:
    """Put back what `scale_of` gave."""
    if state:
        for scaler in _scalers(optimizer):
            scaler.load_state_dict({**state, "scale": torch.tensor([state["scale"]], dtype=torch.float)})


def move_scale(optimizer: Any, overflow: bool) -> None:
    """What a step, taken or skipped, does to the scale."""
    for scaler in _scalers(optimizer):
        scaler.update(overflow)


def _scalers(optimizer: Any) -> list[Any]:
    """Megatron's, one for each part of a chained optimizer; all are moved alike."""
    scalers = (getattr(part, "grad_scaler", None) for part in parts_of(optimizer))
    return [scaler for scaler in scalers if scaler is not None]


def factor_of_losses(averaging: Averaging, optimizer: Any, micro_batches: int) -> float:
    """What this plan multiplies losses by, beside Megatron's own scaling.

    Args:
        micro_batches: by whose number Megatron divides this replica's losses.
    """
    if averaging.per_token:
        return 1.0
    replicas = averaging.first_replicas if scales_losses(optimizer) else averaging.replicas
    return micro_batches * replicas / averaging.micro_batches * averaging.weight


@contextmanager
def scaled_losses(averaging: Averaging, optimizer: Any, model: Any, micro_batches: int) -> Iterator[None]:
    """Multiply what gradients are taken of, losses of experts and predictions included, and nothing reported.

    Args:
        model: Megatron's, or a list of its chunks.
        micro_batches: by whose number Megatron divides this replica's losses.
    """
    factor = factor_of_losses(averaging, optimizer, micro_batches)
    if factor == 1.0:
        yield
        return
    config = get_model_config(model[0] if isinstance(model, list) else model)
    original = config.grad_scale_func
    config.grad_scale_func = lambda loss: original(loss) * factor
    try:
        yield
    finally:
        config.grad_scale_func = original


def inverse_scale(averaging: Averaging, optimizer: Any) -> torch.Tensor | None:
    """What summed gradients are to be multiplied by, of one element; None: by nothing."""
    scaler = next(iter(_scalers(optimizer)), None)
    if scaler is None:
        return None
    inverse: torch.Tensor = scaler.inv_scale
    return inverse if averaging.per_token else inverse * (averaging.replicas / averaging.first_replicas)


def ready_gradients(optimizer: Any) -> None:
    """Put gradients where the step takes them from, not yet divided by the scale, however often it is called.

    Megatron's `prepare_grads` would divide them in place, each time anew.
    """
    for part in parts_of(optimizer):
        if getattr(part, "grad_scaler", None) is None:
            part.prepare_grads()
        elif not part.is_stub_optimizer:
            part._copy_model_grads_to_main_grads()


def divide_gradients(part: Any, inverse: torch.Tensor | None) -> None:
    """Divide those of one part by the scale, in place: once, right before the step."""
    if inverse is not None and not part.is_stub_optimizer:
        unscale(part._collect_main_grad_data_for_unscaling(), inverse)


def unscale(gradients: list[torch.Tensor], inverse: torch.Tensor) -> None:
    """Multiply gradients in place.

    Raises:
        RuntimeError: one is not finite, though all agreed that none is; a step would spoil the model.
    """
    found = torch.zeros(1, dtype=torch.float, device=inverse.device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
    if float(found) > 0:
        raise RuntimeError("a gradient is not finite here, though the agreed norm of all gradients is")
