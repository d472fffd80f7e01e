# SPDX-License-Identifier: Apache-2.0
"""Rounds that count nothing, run by Megatron's own forward and backward steps: they leave all as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_resihp.integration.patches.experts.additional_rounds import wrap_backward_step, wrap_forward_step
from megatron_resihp.integration.patches.prediction_metrics import TRACKER

COUNTED, ROUNDS = 2, 4
BATCHES = [torch.tensor([1.0, 3.0]), torch.tensor([2.0, 5.0])]
Step = Callable[..., Any]


class Chunk(torch.nn.Module):
    """A weight, with losses of its own and of experts and predictions, and counts of all kinds. It counts in its
    backward pass, too, as where passes are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5, -2.0]))
        self.register_buffer("local_tokens_per_expert", torch.zeros(2))
        self.config: Any = SimpleNamespace(
            timers=None, enable_autocast=False, calculate_per_token_loss=False, num_moe_experts=2, mtp_num_layers=1,
            grad_scale_func=lambda loss: loss * 8.0, moe_router_enable_expert_bias=True,
            moe_router_load_balancing_type="aux_loss", deallocate_pipeline_outputs=False,
        )  # fmt: skip

    def set_input_tensor(self, tensors: Any) -> None:
        """The first stage has none."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.weight * batch
        hidden = MoEAuxLossAutoScaler.apply(hidden, (hidden**2).sum())
        hidden = MTPLossAutoScaler.apply(hidden, (hidden**3).sum())
        self._count(batch)
        hidden.register_hook(lambda _: self._count(batch))
        return hidden.sum() ** 2

    def _count(self, batch: torch.Tensor) -> None:
        self.local_tokens_per_expert += batch
        get_moe_metrics_tracker().record("z_loss", batch.sum(), 1, 1)
        TRACKER.setdefault("loss_values", torch.zeros(1)).add_(batch.max())


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No trace of another test, nor of these."""
    for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
        monkeypatch.setattr(scaler, "main_loss_backward_scale", torch.ones(1))
    destroy_moe_metrics_tracker()
    TRACKER.clear()
    yield
    destroy_moe_metrics_tracker()
    TRACKER.clear()


def ordered(ahead: int, rounds: int) -> list[tuple[str, int]]:
    """Forward passes, each so many before its backward pass, as in a stage of 1F1B."""
    last = rounds + ahead
    return [
        op for turn in range(last)
        for op in ([("F", turn)] if turn < rounds else []) + ([("B", turn - ahead)] if turn >= ahead else [])
    ]  # fmt: skip


def trained(ahead: int, rounds: int, evaluates: bool = False) -> tuple[Any, ...]:
    """Gradients, number of tokens and all that is counted after so many rounds, of which the first two count."""
    chunk = Chunk().train(not evaluates)
    runtime: Any = SimpleNamespace(
        view=SimpleNamespace(counts=lambda number: number < COUNTED),
        held=SimpleNamespace(live=SimpleNamespace(model=[chunk])),
    )
    forward, backward = (
        wrap(runtime, original)
        for wrap, original in (
            (wrap_forward_step, schedules.forward_step), (wrap_backward_step, schedules.backward_step),
        )
    )  # fmt: skip
    outputs: dict[int, Any] = {}
    losses: list[Any] = []
    tokens = torch.tensor(0)
    for kind, number in ordered(ahead, rounds):
        if kind == "B":
            backward(None, outputs.pop(number), None, chunk.config)
            continue
        batch = BATCHES[min(number, COUNTED - 1)]
        found = forward(
            lambda _, model, batch=batch: (model(batch), lambda loss: (loss * 3, torch.tensor(3), {"loss": loss})),
            None, chunk, ROUNDS, None, losses, chunk.config, 1, current_microbatch=number,
        )  # fmt: skip
        outputs[number], tokens = found[0], tokens + found[1]
    assert chunk.weight.grad is not None
    metrics = get_moe_metrics_tracker().metrics["z_loss"].values.tolist()
    return (
        chunk.weight.grad.tolist(), int(tokens), metrics, TRACKER.pop("loss_values").tolist(),
        chunk.local_tokens_per_expert.tolist(), [float(each["loss"]) for each in losses[:COUNTED]],
    )  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_they_leave_gradients_and_counts_as_they_are(ahead: int) -> None:
    """In whatever order a stage runs its forward and backward passes."""
    expected = trained(ahead, COUNTED)
    destroy_moe_metrics_tracker()
    assert trained(ahead, ROUNDS) == expected
    assert any(expected[0]) and all(expected[1:])


def test_what_is_not_trained_counts_as_always() -> None:
    few = trained(0, COUNTED, evaluates=True)
    destroy_moe_metrics_tracker()
    many = trained(0, ROUNDS, evaluates=True)
    assert many[1] == 2 * few[1] and many[4] > few[4]


def test_losses_are_scaled_as_before_once_they_are_over() -> None:
    trained(0, ROUNDS)
    assert float(MoEAuxLossAutoScaler.main_loss_backward_scale) == 8.0 / ROUNDS
    assert float(MTPLossAutoScaler.main_loss_backward_scale) == 8.0 / ROUNDS
