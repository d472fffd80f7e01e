# SPDX-License-Identifier: Apache-2.0
"""How unevenly experts are used: what is counted, when, and what the log hears of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import Router

from megatron_resihp.integration.step.expert_loads import EVERY, FIRST, LoadCounter

LAYERS, EXPERTS, SHARERS = 3, 4, 2


class Routing(Router):  # type: ignore[misc]
    """Sends each token to the expert of its number."""

    def __init__(self, layer: int, is_mtp_layer: bool = False) -> None:
        torch.nn.Module.__init__(self)
        self.layer_number, self.is_mtp_layer = layer, is_mtp_layer

    def forward(self, tokens: torch.Tensor) -> Any:
        return tokens, torch.nn.functional.one_hot(tokens, EXPERTS).bool()

    def routing(self, logits: torch.Tensor) -> Any:
        raise AssertionError("forward does it")


def counter() -> LoadCounter:
    return LoadCounter(LAYERS, EXPERTS, SHARERS)


def route(router: Router, *experts: int) -> None:
    router(torch.tensor(experts))


def counted(counts: LoadCounter) -> list[list[float]]:
    return counts.counted().view(LAYERS, EXPERTS).tolist()


class TestCounting:
    def test_tokens_of_all_micro_batches_by_layer_and_expert(self) -> None:
        second, third, counts = Routing(2), Routing(3), counter()
        counts.begin([torch.nn.ModuleList([second]), torch.nn.ModuleList([third])], FIRST)
        route(second, 0, 0, 3)
        route(third, 1)
        route(second, 0, 1)
        assert counted(counts) == [[0, 0, 0, 0], [3, 1, 0, 1], [0, 1, 0, 0]]

    def test_what_an_attempt_that_broke_has_counted_is_forgotten(self) -> None:
        router, counts = Routing(1), counter()
        for _ in range(2):
            counts.begin([router], FIRST)
            route(router, 2)
        assert counted(counts)[0] == [0, 0, 1, 0]

    def test_nothing_after_the_iteration(self) -> None:
        router, counts = Routing(1), counter()
        counts.begin([router], FIRST)
        counts.counted()
        route(router, 2)
        assert not counts.counted().any()

    def test_no_layers_of_predictions_of_further_tokens(self) -> None:
        router, counts = Routing(1, is_mtp_layer=True), counter()
        counts.begin([router], FIRST)
        route(router, 2)
        assert not counts.counted().any()

    def test_few_iterations_and_the_same_on_all_workers(self) -> None:
        counts = counter()
        counting = [iteration for iteration in range(3 * EVERY) if counts.width(iteration)]
        assert counting == [FIRST, FIRST + EVERY, FIRST + 2 * EVERY]
        assert counts.width(FIRST) == LAYERS * EXPERTS == counts.counted().numel()
        assert not LoadCounter(LAYERS, 0, SHARERS).width(FIRST), "a model without experts"
        assert not LoadCounter(LAYERS, EXPERTS, 1).width(FIRST), "nobody shares them"


def news(counts: LoadCounter, *layers: Sequence[float]) -> tuple[float, ...] | None:
    counts.agreed(torch.tensor(layers, dtype=torch.float64).view(-1))
    told = counts.news(FIRST)
    return told[0].busiest_shares if told else None


class TestTelling:
    def test_the_busiest_of_so_many_sharers_on_average_over_layers_with_experts(self) -> None:
        assert news(counter(), [3, 1, 2, 2], [0, 0, 0, 0], [6, 1, 1, 0]) == (1.0, pytest.approx((1.0 + 14 / 8) / 2))

    def test_only_what_has_changed(self) -> None:
        counts = counter()
        assert news(counts, [3, 2, 2, 1]) == (1.0, 1.25)
        assert news(counts, [3, 2.2, 2, 1]) is None
        assert news(counts, [4, 2, 1, 1]) == (1.0, 1.5)

    def test_nothing_of_an_iteration_that_counts_nothing(self) -> None:
        assert news(counter()) is None
        assert not LoadCounter(LAYERS, 0, 1).news(FIRST)
