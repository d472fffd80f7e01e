# SPDX-License-Identifier: Apache-2.0
"""Patches: rounds that count nothing, in which a replica only keeps up with those that share experts with it.

These meet in every layer, so all of them run as many micro-batches. One that has fewer runs its last one again. All
gradients of that are zeros: its loss is multiplied by 0, and so are those of experts and of predictions of further
tokens. What other workers' experts get of its tokens are zeros, too. It leaves no trace in what is counted, and nothing
in it fails that hasn't failed in the same micro-batch before. Replaces forward_step and backward_step of
megatron.core.pipeline_parallel.schedules, which Megatron's schedules call for each micro-batch and chunk. May import
megatron and this package.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_resihp.integration.patch import Patch
from megatron_resihp.integration.patches.prediction_metrics import TRACKER
from megatron_resihp.integration.probes.steps_in_turns import tensors
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.expert_biases import counts_in

SCHEDULES: Final = "megatron.core.pipeline_parallel.schedules"
SCALERS: Final = (MoEAuxLossAutoScaler, MTPLossAutoScaler)
"""What multiplies losses beside the model's own, as their gradients are computed."""
SCALE: Final = "main_loss_backward_scale"
MARK: Final = "resihp_counts_nothing"
"""On what a forward pass returns, for its backward pass."""


def round_patches(runtime: Runtime) -> list[Patch]:
    """Those that one worker needs: none where replicas share no experts under any plan."""
    return patches_of(runtime) if runtime.job.own.shares_experts else []


def patches_of(runtime: Runtime) -> list[Patch]:
    """All of them."""
    return [
        Patch(
            f"{SCHEDULES}:forward_step",
            functools.partial(wrap_forward_step, runtime),
            ("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor"),
            "leaves no trace of rounds that count nothing",
        ),
        Patch(
            f"{SCHEDULES}:backward_step",
            functools.partial(wrap_backward_step, runtime),
            ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
            "gives rounds that count nothing no gradients",
        ),
    ]


def wrap_forward_step(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pass that leaves no trace where its round counts nothing."""

    @functools.wraps(original)
    def forward_step(
        forward_step_func: Any, data_iterator: Any, model: Any, *positional: Any, current_microbatch: int,
        **options: Any,
    ) -> Any:  # fmt: skip
        def run() -> Any:
            return original(
                forward_step_func, data_iterator, model, *positional, current_microbatch=current_microbatch, **options
            )

        if not model.training or runtime.view.counts(current_microbatch):
            return run()
        with uncounted(runtime.held.live.model):
            output, tokens = run()
        for each in tensors(output):
            setattr(each, MARK, True)
        return output, torch.zeros_like(tokens)

    return forward_step


def wrap_backward_step(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that gives zeros where its round counts nothing. Recomputation in it leaves no trace either."""

    @functools.wraps(original)
    def backward_step(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any) -> Any:
        if not any(hasattr(each, MARK) for each in tensors(output_tensor)):
            return original(input_tensor, output_tensor, output_tensor_grad, config)
        with uncounted(runtime.held.live.model), without_gradients(config):
            return original(input_tensor, output_tensor, output_tensor_grad, config)

    return backward_step


@contextmanager
def uncounted(model: Any) -> Iterator[None]:
    """Put back what passes of a micro-batch count: tokens of experts, and what is logged of experts and predictions.

    Args:
        model: a worker's chunks. Each has run a micro-batch that counts before, so that all that is counted is there.
    """
    logged = [entry.values for entry in get_moe_metrics_tracker().metrics.values()]
    predicted = [value for value in TRACKER.values() if isinstance(value, torch.Tensor)]
    counted = [*logged, *predicted, *counts_in(model)]
    before = [each.clone() for each in counted]
    yield
    with torch.no_grad():
        for each, value in zip(counted, before, strict=True):
            each.copy_(value)


@contextmanager
def without_gradients(config: Any) -> Iterator[None]:
    """Multiply all losses by 0 in a backward pass. `config`: the model's."""
    scaled, scales = config.grad_scale_func, [getattr(each, SCALE) for each in SCALERS]
    config.grad_scale_func = lambda loss: scaled(loss) * 0
    for scaler, scale in zip(SCALERS, scales, strict=True):
        setattr(scaler, SCALE, None if scale is None else torch.zeros_like(scale))
    try:
        yield
    finally:
        config.grad_scale_func = scaled
        for scaler, scale in zip(SCALERS, scales, strict=True):
            setattr(scaler, SCALE, scale)
