# SPDX-License-Identifier: Apache-2.0
"""B without W, of Megatron's linear layers: what is left for W is what the whole backward pass would have added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch.utils.checkpoint import checkpoint

from megatron_resihp.integration.ops import split_backward
from megatron_resihp.integration.ops.split_backward import LINEAR, WeightGradient, leaving_weights, remembering_bias

Run = Callable[[torch.Tensor], torch.Tensor]


class Layer:
    """A linear layer of Megatron's, alone in its tensor-parallel group, with a gradient buffer."""

    def __init__(self) -> None:
        self.weight: Any = torch.nn.Parameter(torch.randn(3, 4))
        self.bias: Any = torch.nn.Parameter(torch.randn(3))
        for parameter in (self.weight, self.bias):
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.grad_added_to_main_grad = False

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layers.linear_with_grad_accumulation_and_async_allreduce(
            given, self.weight, self.bias, False, False, sequence_parallel=False
        )
        return result

    def recomputed(self, given: torch.Tensor) -> torch.Tensor:
        """The same, forgotten after F and computed again in B."""
        result: torch.Tensor = checkpoint(self, given, use_reentrant=True)
        return result

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the buffers have."""
        return self.weight.main_grad.clone(), self.bias.main_grad.clone()


@pytest.mark.parametrize("name", ["__call__", "recomputed"])
def test_w_adds_each_micro_batchs_gradient_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    plain = LINEAR.forward, LINEAR.backward
    torch.manual_seed(0)
    layer = Layer()
    run: Run = getattr(layer, name)
    batches = [torch.randn(5, 2, 4, requires_grad=True) for _ in range(2)]
    with remembering_bias(True):
        outputs = [run(batch) for batch in batches]
    left = []
    for output in outputs:
        with leaving_weights(True) as own:
            output.sum().backward()
        left.append(own)
    assert [len(own) for own in left] == [1, 1]
    assert not any(gradient.any() for gradient in layer.gradients()), "B has done W's work"
    for batch, own in zip(batches, left, strict=True):
        before = layer.gradients()
        for later in own:
            later.compute()
        added = [after - old for after, old in zip(layer.gradients(), before, strict=True)]
        ones = torch.ones(10, 3)
        torch.testing.assert_close(added[0], ones.t() @ batch.detach().reshape(10, 4))
        torch.testing.assert_close(added[1], ones.sum(dim=0))
        torch.testing.assert_close(batch.grad, (ones @ layer.weight.detach()).view(5, 2, 4))
    assert (LINEAR.forward, LINEAR.backward) == plain


def test_with_sequence_parallelism_w_needs_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member kept its own half of what the layer was given, and has the gradient of all of the output."""
    torch.manual_seed(0)
    whole, gradient = torch.randn(6, 2, 4), torch.randn(6, 2, 3)
    halves = whole.chunk(2)

    class Pair:
        def size(self) -> int:
            return 2

    def gather(target: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        assert own.is_contiguous() and torch.equal(own, halves[1]) and isinstance(group, Pair)
        target.copy_(torch.cat(halves))

    monkeypatch.setattr(split_backward.layers, "dist_all_gather_func", gather)
    layer = Layer()
    later = WeightGradient(halves[1], layer.weight, layer.bias, True, Pair())
    later.append(gradient)
    later.compute()
    weight, bias = layer.gradients()
    torch.testing.assert_close(weight, gradient.reshape(12, 3).t() @ whole.reshape(12, 4))
    torch.testing.assert_close(bias, gradient.reshape(12, 3).sum(dim=0))
