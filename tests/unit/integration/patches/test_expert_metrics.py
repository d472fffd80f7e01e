# SPDX-License-Identifier: Apache-2.0
"""What the log says of experts' balance doesn't depend on how many workers share a micro-batch's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_resihp.integration.patches.experts.expert_metrics import NAMES, forget, recorded

TOKENS, HIDDEN, EXPERTS = 16, 8, 4
Z_LOSSES = (1.0, 2.0, 3.0, 6.0)
"""Of the tokens of a micro-batch."""
Record = Callable[[Sequence[float]], None]
"""Tells Megatron's tracker what a worker has found of its own tokens."""


@pytest.fixture(autouse=True)
def tracker() -> Iterator[None]:
    forget()
    yield
    forget()


def mean_without_a_group(found: Sequence[float]) -> None:
    """As Megatron 0.18 records z_loss."""
    get_moe_metrics_tracker().record("z_loss", torch.tensor(found).mean(), 1, 1)


def mean_with_a_group(found: Sequence[float]) -> None:
    """As Megatron 0.19 does."""
    group: Any = "all that share"
    get_moe_metrics_tracker().record("z_loss", torch.tensor(found).mean(), 1, 1, avg_group=group)


def part_of_a_sum(found: Sequence[float]) -> None:
    """As both record the losses that balance experts."""
    group: Any = "all that share"
    part = torch.tensor(found).sum() / len(Z_LOSSES)
    get_moe_metrics_tracker().record("z_loss", part, 1, 1, reduce_group=group)


@pytest.mark.parametrize("members", [1, 2, 4])
@pytest.mark.parametrize("record", [mean_without_a_group, mean_with_a_group, part_of_a_sum])
def test_the_log_has_the_mean_over_a_micro_batch(record: Record, members: int) -> None:
    own = len(Z_LOSSES) // members
    assert logged(members, lambda member: record(Z_LOSSES[member * own :][:own])) == pytest.approx(3.0)


@pytest.mark.parametrize("members", [2, 4])
def test_megatrons_own_router_says_the_same_of_a_shared_micro_batch(
    monkeypatch: pytest.MonkeyPatch, members: int
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    batch = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1))
    parts, router = batch.chunk(members), router_of(members)
    alone = logged(1, lambda _: router_of(1)(batch))
    assert logged(members, lambda member: router(parts[member])) == pytest.approx(alone)


def logged(members: int, work: Callable[[int], Any]) -> float:
    """What these members' step agrees on of z_loss, after each has done its work."""
    total = 0.0
    for member in range(members):
        forget()
        work(member)
        total += recorded(members, 0)[NAMES.index("z_loss")]
    return total


def router_of(members: int) -> TopKRouter:
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_topk=2,
        moe_router_load_balancing_type="none", moe_z_loss_coeff=0.5, add_bias_linear=False,
        use_cpu_initialization=True,
    )  # fmt: skip
    alone, sharers = (SimpleNamespace(size=lambda size=size: size, rank=lambda: 0) for size in (1, members))
    groups: Any = SimpleNamespace(tp=sharers, cp=alone, tp_cp=sharers, tp_dp_cp=sharers)
    router = TopKRouter(config, pg_collection=groups)
    router.set_layer_number(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(2)))
    return router.train()
