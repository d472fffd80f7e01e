# SPDX-License-Identifier: Apache-2.0
"""Attention of workers that share a sequence equals attention of one worker that has all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_resihp.cpu import context_attention
from megatron_resihp.cpu.context_attention import causal_mask, positions, whole_sequence

LIMIT_S = 20.0
TOKENS = 16


class Together:
    """Collectives between threads: each brings a tensor, and all get what is made of them."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._barrier = threading.Barrier(workers, timeout=LIMIT_S)
        self._brought: list[torch.Tensor] = [torch.empty(0)] * workers

    def meet(
        self, rank: int, own: torch.Tensor, make: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        self._brought[rank] = own
        self._barrier.wait()
        made = make(self._brought)
        self._barrier.wait()
        return made


class Member:
    """A group, as one of its members has it."""

    def __init__(self, together: Together, rank: int) -> None:
        self.together, self.rank = together, rank


class Collectives:
    """What stands for torch.distributed."""

    @staticmethod
    def get_world_size(group: Member) -> int:
        return group.together.workers

    @staticmethod
    def get_rank(group: Member) -> int:
        return group.rank

    @staticmethod
    def all_gather_into_tensor(output: torch.Tensor, own: torch.Tensor, group: Member) -> None:
        output.copy_(group.together.meet(group.rank, own, torch.cat))

    @staticmethod
    def reduce_scatter_tensor(output: torch.Tensor, whole: torch.Tensor, group: Member) -> None:
        total = group.together.meet(group.rank, whole, lambda brought: torch.stack(list(brought)).sum(dim=0))
        output.copy_(total.chunk(group.together.workers)[group.rank])


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """[tokens, samples, heads, head size]; a key serves several heads."""
    key, value = (each.repeat_interleave(query.size(2) // each.size(2), dim=2) for each in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key).masked_fill(masked, -torch.inf)
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value)


@pytest.mark.parametrize("workers", (2, 4))
def test_outputs_and_gradients_are_those_of_the_whole_sequence(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_attention, "dist", Collectives)
    torch.manual_seed(0)
    sizes = ((4, 8), (2, 8), (2, 6))
    inputs = [torch.randn(TOKENS, 3, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    upstream = torch.randn(TOKENS, 3, 4, 6, dtype=torch.float64)
    whole = attention(*inputs, torch.ones(TOKENS, TOKENS).triu(1).bool())
    gradients = torch.autograd.grad(whole, inputs, upstream)
    together = Together(workers)

    def run(rank: int) -> tuple[torch.Tensor, ...]:
        group, own = Member(together, rank), positions(rank, workers, TOKENS)
        query, key, value = (each.detach()[own].requires_grad_() for each in inputs)
        keys, values = (whole_sequence(each, group) for each in (key, value))
        output = attention(query, keys, values, causal_mask(rank, workers, TOKENS))
        return output, *torch.autograd.grad(output, (query, key, value), upstream[own])

    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(run, range(workers), timeout=2 * LIMIT_S))
    for rank, parts in enumerate(found):
        own = positions(rank, workers, TOKENS)
        for part, expected in zip(parts, (whole, *gradients), strict=True):
            torch.testing.assert_close(part, expected[own])


@pytest.mark.parametrize("rank", range(3))
def test_a_worker_has_the_tokens_that_megatron_gives_it(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", Collectives.get_world_size)
    monkeypatch.setattr(torch.distributed, "get_rank", Collectives.get_rank)
    tokens = torch.arange(24)
    group = Member(Together(3), rank)
    batch = get_batch_on_this_cp_rank({"tokens": tokens[None]}, is_hybrid_cp=False, cp_group=group)  # type: ignore[arg-type]
    assert batch["tokens"][0].equal(positions(rank, 3, 24))
