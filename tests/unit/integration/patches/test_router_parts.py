# SPDX-License-Identifier: Apache-2.0
"""Routers that weigh tokens against each other do so among the same tokens, whatever the degree of their stage."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, sinkhorn

from megatron_resihp.integration.patches.experts import router_parts
from megatron_resihp.integration.patches.experts.router_parts import wrap_dropping, wrap_sinkhorn
from megatron_resihp.integration.world.heterogeneous_groups import HeterogeneousView, Sizes
from megatron_resihp.plan import Chunk, ParallelPlan, Replica

OWN = 2
"""The job's own tensor-parallel degree."""
TOKENS, EXPERTS, TOPK = 24, 4, 2
DEGREES = pytest.mark.parametrize("degree", [1, 2, 3, 4])
RUNTIME: Any = SimpleNamespace(job=SimpleNamespace(own=SimpleNamespace(tensor_parallel=OWN)))


@pytest.fixture
def stage_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process a member of a stage, all of whose members together have these rows."""

    def become(degree: int, rank: int, *rows: torch.Tensor) -> None:
        def gather(every: torch.Tensor, part: torch.Tensor, group: Any) -> None:
            [found] = [each for each in rows if torch.equal(each.to(part.dtype).chunk(degree)[rank], part)]
            every.copy_(found)

        group = SimpleNamespace(size=lambda: degree, rank=lambda: rank)
        monkeypatch.setattr(router_parts.mpu, "get_tensor_model_parallel_group", lambda: group)
        monkeypatch.setattr(router_parts.dist, "all_gather_into_tensor", gather)

    return become


def scores() -> torch.Tensor:
    """Of tokens by expert. The parts differ: sinkhorn makes up for what all tokens of a part have in common."""
    made = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(5))
    made[: TOKENS // 2, 0] += 3
    return made


def routed() -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and places of the chosen experts."""
    probs, chosen = scores().softmax(dim=1).topk(TOPK)
    whole = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, probs)
    return whole, whole > 0


@DEGREES
def test_sinkhorn_evens_out_the_jobs_own_parts(stage_of: Callable[..., None], degree: int) -> None:
    cost, found = scores(), []
    for rank, part in enumerate(cost.chunk(degree)):
        stage_of(degree, rank, cost)
        found.append(wrap_sinkhorn(RUNTIME, sinkhorn)(part))
    expected = torch.cat([sinkhorn(part) for part in cost.chunk(OWN)])
    assert torch.equal(torch.cat(found), expected)
    # The control: all tokens together choose other experts.
    assert not torch.equal(expected.argmax(1), sinkhorn(cost).argmax(1))


@DEGREES
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_what_the_jobs_own_parts_drop_is_dropped(stage_of: Callable[..., None], policy: str, degree: int) -> None:
    whole, places = routed()
    probs, kept = [], []
    for rank, (part, routes) in enumerate(zip(whole.chunk(degree), places.chunk(degree), strict=True)):
        stage_of(degree, rank, whole, places)
        leaf = part.clone().requires_grad_()
        left, remaining = wrap_dropping(RUNTIME, apply_router_token_dropping)(leaf, routes, TOPK, 0.75, policy)
        left.sum().backward()
        assert leaf.grad is not None and torch.equal(leaf.grad, remaining.float()), "only what is kept has a gradient"
        probs.append(left.detach())
        kept.append(remaining)
    parts = zip(whole.chunk(OWN), places.chunk(OWN), strict=True)
    expected = [apply_router_token_dropping(part, routes, TOPK, 0.75, policy) for part, routes in parts]
    assert torch.equal(torch.cat(probs), torch.cat([each for each, _ in expected]))
    assert torch.equal(torch.cat(kept), torch.cat([each for _, each in expected]))
    # The control: of all tokens together others are dropped.
    _, together = apply_router_token_dropping(whole, places, TOPK, 0.75, policy)
    assert together.dtype == kept[0].dtype and not torch.equal(torch.cat(kept), together)


def test_stages_of_the_jobs_own_degree_are_megatrons(stage_of: Callable[..., None]) -> None:
    stage_of(OWN, 1)
    given = torch.zeros(2, 2)
    assert wrap_sinkhorn(RUNTIME, lambda cost: cost)(given) is given
    assert wrap_dropping(RUNTIME, lambda probs, places: (probs, places))(given, given)[0] is given


def test_parts_of_unequal_length_are_refused(stage_of: Callable[..., None]) -> None:
    stage_of(1, 0)
    with pytest.raises(RuntimeError, match="5 tokens can't be routed as in the job's own layout, in 2 equal parts"):
        wrap_sinkhorn(RUNTIME, sinkhorn)(torch.zeros(5, EXPERTS))


@pytest.mark.parametrize(("worker", "padded"), [(0, False), (1, True)])
def test_only_stages_of_the_jobs_own_degree_pad_to_the_capacity(worker: int, padded: bool) -> None:
    layers = (Chunk(0, 0, 6),)
    plan = ParallelPlan((Replica(((0,),), (0,), layers), Replica(((1, 2),), (1,), layers)), {})
    holder = SimpleNamespace(tensor_model_parallel_size=OWN, moe_pad_expert_input_to_capacity=True)
    derived: Any = SimpleNamespace(of_degree=lambda degree: {})
    sizes = Sizes(64, derived, holder)
    sizes.replace(HeterogeneousView(plan, worker, None))
    assert holder.moe_pad_expert_input_to_capacity is padded
    sizes.restore()
    assert holder.moe_pad_expert_input_to_capacity
