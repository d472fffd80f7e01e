# SPDX-License-Identifier: Apache-2.0
"""Patch: the schedule. Gives each replica its own share of the micro-batches and weighs every sample the same.

Replaces megatron.training.training.get_forward_backward_func. Megatron divides each loss by the replica's own count and
averages over replicas; with unlike counts that would weigh samples by their replica (DESIGN contract 2).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_resihp.integration.ops.program_schedule import run_evaluation, run_training
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.step.loss_scale import factor_of_losses
from megatron_resihp.integration.world.heterogeneous import Heterogeneous
from megatron_resihp.plan import even_share

Schedule = Callable[..., list[dict[str, Any]]]


def wrap_get_forward_backward_func(runtime: Runtime, original: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """The replacement of get_forward_backward_func."""

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Schedule:
        return functools.partial(_run, runtime, original(*args, **kwargs))

    return get_forward_backward_func


def _run(runtime: Runtime, schedule: Schedule, **kwargs: Any) -> list[dict[str, Any]]:
    if runtime.heterogeneous is not None:
        return _run_heterogeneous(runtime, runtime.heterogeneous, kwargs)
    if kwargs.get("forward_only"):
        return _evaluate(runtime, schedule, kwargs)
    runtime.probes.begin_schedule()
    share = runtime.micro_batches
    with _scaled_losses(runtime, kwargs["model"], len(share)):
        runtime.losses = schedule(**{**kwargs, "num_microbatches": len(share)})
    return runtime.losses


def _evaluate(runtime: Runtime, schedule: Schedule, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """Who has nothing to evaluate takes part in the sums over replicas, with a micro-batch that counts nothing."""
    replicas = len(runtime.current_plan.replicas)
    share = even_share(kwargs["num_microbatches"], replicas, runtime.replica)
    runtime.reach("evaluate")
    losses = schedule(**{**kwargs, "num_microbatches": max(len(share), 1)})
    return losses if share else [{name: torch.zeros_like(value) for name, value in each.items()} for each in losses]


def _run_heterogeneous(runtime: Runtime, heterogeneous: Heterogeneous, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    call = (kwargs["forward_step_func"], kwargs["data_iterator"], kwargs["model"], kwargs["num_microbatches"])
    if kwargs.get("forward_only"):
        runtime.reach("evaluate")
        return run_evaluation(runtime, heterogeneous, *call)
    runtime.probes.begin_schedule()
    with _scaled_losses(runtime, kwargs["model"], kwargs["num_microbatches"]):
        runtime.losses = run_training(runtime, heterogeneous, *call)
    return runtime.losses


def _first(model: Any) -> Any:
    return model[0] if isinstance(model, list) else model


@contextmanager
def _scaled_losses(runtime: Runtime, model: Any, micro_batches: int) -> Iterator[None]:
    """Multiply what gradients are taken of, auxiliary losses of experts included, and nothing reported."""
    factor = factor_of_losses(runtime, micro_batches)
    if factor == 1.0:
        yield
        return
    config = get_model_config(_first(model))
    original = config.grad_scale_func
    config.grad_scale_func = lambda loss: original(loss) * factor
    try:
        yield
    finally:
        config.grad_scale_func = original
