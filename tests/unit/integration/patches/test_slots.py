# SPDX-License-Identifier: Apache-2.0
"""Megatron's dispatchers with experts that are dealt out in unequal numbers: each token gets what its experts make of
it, and all gradients are those of one worker with all experts.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_resihp import cpu
from megatron_resihp.plan.experts import dealt_experts

TOKENS, WIDTH, TOPK = 6, 4, 2
LIMIT_S = 240.0


def inputs(rank: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A worker's tokens, the experts that they go to and how they weigh these, and the gradient of what comes back."""
    drawn = torch.Generator().manual_seed(rank)
    tokens, gradient = (torch.randn(TOKENS, 1, WIDTH, generator=drawn, dtype=torch.double) for _ in range(2))
    weights, chosen = torch.rand(TOKENS, experts, generator=drawn, dtype=torch.double).topk(TOPK)
    routed = torch.zeros(TOKENS, experts, dtype=torch.bool).scatter(1, chosen, True)
    return tokens, routed, torch.zeros(TOKENS, experts, dtype=torch.double).scatter(1, chosen, weights), gradient


def matrices(experts: int) -> list[torch.Tensor]:
    """What the experts multiply tokens by."""
    drawn = torch.Generator().manual_seed(99)
    return [torch.randn(WIDTH, WIDTH, generator=drawn, dtype=torch.double).requires_grad_() for _ in range(experts)]


def alone(sharers: int, experts: int) -> tuple[list[Any], list[torch.Tensor]]:
    """For each worker: what comes back, and the gradients of tokens and weights; and the gradients of all experts."""
    layer, found = matrices(experts), []
    for rank in range(sharers):
        tokens, _, weights, gradient = inputs(rank, experts)
        tokens.requires_grad_()
        weights.requires_grad_()
        back = sum(weights[:, e].view(-1, 1, 1) * torch.tanh(tokens @ layer[e]) for e in range(experts))
        assert isinstance(back, torch.Tensor)
        back.backward(gradient)
        found.append((back.detach(), tokens.grad, weights.grad))
    return found, [torch.zeros(WIDTH, WIDTH) if each.grad is None else each.grad for each in layer]


def work(rank: int, sharers: int, experts: int, kind: str, directory: str) -> None:
    """One worker's part of a layer, by Megatron's dispatcher."""
    cpu.install(force=True)
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_resihp.integration.patches.experts.slots import AllGatherInSlots, AllToAllInSlots

    torch.set_num_threads(1)
    parallel_state._set_global_memory_buffer()
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=sharers)
    every = dist.group.WORLD
    own_group = [dist.new_group([each]) for each in range(sharers)][rank]
    groups = SimpleNamespace(ep=every, expt_tp=own_group, tp_ep=every)
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=1, num_moe_experts=experts, moe_router_topk=TOPK,
        moe_token_dispatcher_type=kind,
    )  # fmt: skip
    dispatcher = {"alltoall": AllToAllInSlots, "allgather": AllGatherInSlots}[kind](config, groups)
    own = dealt_experts(experts, sharers)[rank]
    layer = matrices(experts)
    tokens, routed, weights, gradient = inputs(rank, experts)
    tokens.requires_grad_()
    weights.requires_grad_()
    sent = dispatcher.dispatch_preprocess(tokens, routed, weights)
    here, per_expert, weighed = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
    parts = zip(here.split(per_expert.tolist()), weighed.split(per_expert.tolist()), own, strict=True)
    made = torch.cat([torch.tanh(each @ layer[e]) * share.unsqueeze(-1) for each, share, e in parts])
    back = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(made)))
    back.backward(gradient)
    found = back.detach(), tokens.grad, weights.grad, {e: layer[e].grad for e in own}
    torch.save(found, f"{directory}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
@pytest.mark.parametrize("experts", [8, 4])
def test_a_layer_is_as_that_of_one_worker(tmp_path: Path, kind: str, experts: int) -> None:
    """Eight experts on three workers as 3, 3 and 2, and four as 2, 1 and 1."""
    sharers = 3
    workers = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(sharers), str(experts), kind, str(tmp_path)])
        for rank in range(sharers)
    ]
    try:
        assert [worker.wait(LIMIT_S) for worker in workers] == [0] * sharers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    expected, of_experts = alone(sharers, experts)
    for rank in range(sharers):
        *found, own = torch.load(tmp_path / f"{rank}.pt")
        for mine, theirs in zip(found, expected[rank], strict=True):
            chosen = inputs(rank, experts)[1] if mine.shape == (TOKENS, experts) else torch.tensor(True)
            torch.testing.assert_close(mine, theirs * chosen)
        for number, gradient in own.items():
            torch.testing.assert_close(gradient, of_experts[number], check_dtype=False)


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
