# SPDX-License-Identifier: Apache-2.0
"""B without W: a backward pass that leaves the weight gradients of Megatron's linear layers for later.

Megatron's own layers can leave out a weight gradient where a kernel adds it to the gradient buffer; we are that kernel,
later. All other parameters (norms, embeddings) get their gradients in B, and so do all of Transformer Engine's layers:
`cost.training` tells planners that. May import megatron.
Source of the split: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

LINEAR = layers.LinearWithGradAccumulationAndAsyncCommunication


@dataclass
class WeightGradient:
    """A weight gradient that is still to be computed: what the layer was given, and the gradient of its output."""

    given: torch.Tensor
    weight: Any
    bias: Any
    sequence_parallel: bool
    group: Any
    gradient: torch.Tensor | None = None

    def append(self, gradient: torch.Tensor) -> None:
        """What Megatron calls instead of computing it."""
        self.gradient = gradient

    @torch.no_grad()
    def compute(self) -> None:
        """Add it to the gradient buffer."""
        given = self._gathered() if self.sequence_parallel else self.given
        gradient, given = layers.prepare_input_tensors_for_wgrad_compute(self.gradient, given)
        self.weight.main_grad.add_(gradient.t().matmul(given))
        if self.bias is not None:
            self.bias.main_grad.add_(gradient.sum(dim=0))

    def _gathered(self) -> torch.Tensor:
        shape = (self.given.shape[0] * self.group.size(), *self.given.shape[1:])
        whole = torch.empty(shape, dtype=self.given.dtype, device=self.given.device)
        layers.dist_all_gather_func(whole, self.given.contiguous(), group=self.group)
        return whole


@contextmanager
def remembering_bias(wanted: bool) -> Iterator[None]:
    """While it lasts, forward passes note what a later `leaving_weights` needs, if that is wanted."""
    if not wanted:
        yield
        return
    original = LINEAR.forward

    def forward(ctx: Any, given: Any, weight: Any, bias: Any, *others: Any) -> Any:
        ctx.resihp_bias = bias
        return original(ctx, given, weight, bias, *others)

    with _replaced("forward", forward):
        yield


@contextmanager
def leaving_weights(wanted: bool) -> Iterator[list[WeightGradient]]:
    """While it lasts, backward passes compute no weight gradients of linear layers, if that is wanted; gives those that
    are to be computed later. What was forgotten after F to be computed again now is among them, once."""
    left: list[WeightGradient] = []
    if not wanted:
        yield left
        return
    original = LINEAR.backward

    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        given, weight = ctx.saved_tensors
        later = WeightGradient(given, weight, ctx.resihp_bias, ctx.sequence_parallel, ctx.tp_group)
        ctx.use_bias, ctx.gradient_accumulation_fusion, ctx.main_grad = False, True, weight.main_grad
        ctx.grad_output_buffer, ctx.wgrad_deferral_limit = _Buffer(later), 0
        left.append(later)
        return original(ctx, gradient)

    with remembering_bias(True), _replaced("backward", backward):
        yield left


class _Buffer:
    """What Megatron takes for its list of output gradients whose weight gradients are computed later."""

    def __init__(self, later: WeightGradient) -> None:
        self.append = later.append


@contextmanager
def _replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    original = LINEAR.__dict__[name]
    setattr(LINEAR, name, staticmethod(function))
    try:
        yield
    finally:
        setattr(LINEAR, name, original)
