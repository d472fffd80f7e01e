# SPDX-License-Identifier: Apache-2.0
"""The loss scale: gradients are divided by it once, and nobody's scale differs from another's."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

from megatron_resihp.integration.step.loss_scale import (
    Averaging,
    divide_gradients,
    factor_of_losses,
    inverse_scale,
    move_scale,
    ready_gradients,
    restore_scale,
    scale_of,
    scales_losses,
)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *given, device=None, **options: plain(*given, **options))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, device=None: tensor)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def dynamic() -> DynamicGradScaler:
    return DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, growth_interval=3, hysteresis=2)


class Part:
    """A part of a chained optimizer whose gradients are in Megatron's buffers, as those are that are 32 bits wide."""

    is_stub_optimizer = False

    def __init__(self, scaler: Any, *gradient: float) -> None:
        self.grad_scaler = scaler
        self.buffer = torch.tensor(gradient)
        self.main: torch.Tensor | None = None

    def _copy_model_grads_to_main_grads(self) -> None:
        self.main = self.buffer.float()

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        assert self.main is not None
        return [self.main]


def chained(*parts: Any) -> Any:
    return SimpleNamespace(chained_optimizers=list(parts))


def stub(scaler: Any) -> Any:
    return SimpleNamespace(is_stub_optimizer=True, grad_scaler=scaler)


def test_the_scale_and_when_it_moves_next_survive_a_recovery() -> None:
    lived, anew = chained(stub(dynamic()), Part(dynamic())), chained(Part(dynamic()), stub(dynamic()))
    for overflow in (True, False, False):
        move_scale(lived, overflow)
    restore_scale(anew, json.loads(json.dumps(scale_of(lived))))
    assert scale_of(anew) == scale_of(lived) == {"scale": 1024.0, "growth_tracker": 2, "hysteresis_tracker": 1}
    move_scale(lived, True)
    move_scale(anew, True)
    for part in (*lived.chained_optimizers, *anew.chained_optimizers):
        assert part.grad_scaler.scale.item() == 512.0, "all parts' alike, also of those without parameters"


@pytest.mark.parametrize("scaler", [None, ConstantGradScaler])
def test_a_scale_that_never_moves_has_no_state(scaler: Any) -> None:
    optimizer = chained(Part(scaler and scaler(8.0)))
    move_scale(optimizer, True)
    assert scale_of(optimizer) == {}
    restore_scale(optimizer, {})
    assert scales_losses(optimizer) == (scaler is not None)


def test_gradients_are_divided_once() -> None:
    part = Part(dynamic(), 2048.0, -1024.0)
    for _ in range(2):
        ready_gradients(chained(part))
    divide_gradients(part, part.grad_scaler.inv_scale)
    assert part.main is not None and part.main.tolist() == [2.0, -1.0]


def test_no_step_is_taken_with_a_gradient_that_is_not_finite() -> None:
    part = Part(dynamic(), 1.0, torch.inf)
    ready_gradients(chained(part))
    with pytest.raises(RuntimeError, match="not finite"):
        divide_gradients(part, part.grad_scaler.inv_scale)


def averaging(replicas: int, *, per_token: bool = False) -> Averaging:
    """Of a job of eight micro-batches that began with two replicas."""
    return Averaging(per_token, micro_batches=8, first_replicas=2, replicas=replicas)


@pytest.mark.parametrize(
    ("replicas", "counts", "heterogeneous"), [(2, [4, 4], False), (2, [5, 3], False), (1, [8], False), (3, [8], True)]
)
def test_micro_batches_are_scaled_alike_and_gradients_whole_under_any_plan(
    replicas: int, counts: list[int], heterogeneous: bool
) -> None:
    """Megatron divides losses by `count` of a replica, we by that of all; and it averages over replicas."""
    scaled, plain, average = chained(Part(dynamic())), chained(Part(None)), 1 if heterogeneous else replicas
    under = averaging(average)
    inverse = inverse_scale(under, scaled)
    assert inverse is not None and inverse_scale(under, plain) is None
    for count in counts:
        multiplied = 1024.0 * factor_of_losses(under, scaled, count) / count
        assert multiplied == 1024.0 * 2 / 8, "as in the job's own layout"
        assert float(inverse) * multiplied / average == 1 / 8
        assert factor_of_losses(under, plain, count) / count / average == 1 / 8


def test_losses_that_are_summed_over_tokens_are_only_scaled() -> None:
    optimizer, under = chained(Part(dynamic())), averaging(1, per_token=True)
    inverse = inverse_scale(under, optimizer)
    assert factor_of_losses(under, optimizer, 8) == 1.0 and inverse is not None and float(inverse) == 1 / 1024
