# SPDX-License-Identifier: Apache-2.0
"""Biases of routers, and the counts of tokens that they follow: changed once in each step that is taken, and moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter

from megatron_resihp.integration.state.expert_biases import (
    TOKENS,
    begin_counting,
    change_biases,
    count_exactly,
    keep_counts,
    share_counts,
    sum_only,
    sum_quantiles,
)
from megatron_resihp.integration.state.extra_state import ExtraState
from megatron_resihp.integration.state.shard import fill_shard, shard_tensors, states_of
from megatron_resihp.integration.state.slice_state import (
    Holding,
    HostFiller,
    _Filler,
    gradient_views,
    slice_states,
    summed_views,
)
from megatron_resihp.integration.step.optimizer_shards import fill_buffers, whole_buffers
from megatron_resihp.integration.step.step import take_step
from megatron_resihp.integration.trained import Trained
from megatron_resihp.integration.world.slice_shares import SliceShares
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Shard
from megatron_resihp.plan.slices import WHOLE, Slice

EXPERTS = 4
RATE = 0.25
COUNTS = [[5.0, 1.0, 3.0, 3.0], [0.0, 8.0, 0.0, 0.0]]
"""Of two layers; 3 and 2 are the means."""
CHANGED = [[-RATE, RATE, 0.0, 0.0], [RATE, -RATE, RATE, RATE]]
SHARD = Shard(1, 3, 0, 1)


class Router(torch.nn.Module):
    """What of Megatron's router is about biases."""

    _maintain_float32_expert_bias = TopKRouter._maintain_float32_expert_bias

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("local_tokens_per_expert", torch.zeros(EXPERTS), persistent=False)
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))


def chunk(counts: list[list[float]] = COUNTS, enabled: bool = True) -> Any:
    """Layers 1 and 2, which are routers and nothing else."""
    config = SimpleNamespace(
        moe_router_enable_expert_bias=enabled, moe_router_bias_update_rate=RATE, moe_router_load_balancing_type="none",
    )  # fmt: skip
    layers = torch.nn.ModuleList(Router(config) for _ in counts)
    for router, counted in zip(layers, counts, strict=True):
        router.local_tokens_per_expert.copy_(torch.tensor(counted))
    model: Any = torch.nn.ModuleDict({"decoder": torch.nn.ModuleDict({"layers": layers})})
    model.config = config
    return model


def trained(*chunks: Any) -> Trained:
    inner = SimpleNamespace(param_groups=[], state={})
    optimizer = SimpleNamespace(optimizer=inner, is_stub_optimizer=False, grad_scaler=None, config=None)
    return Trained(list(chunks), optimizer, None)


def biases(*chunks: Any) -> list[list[float]]:
    return [router.expert_bias.tolist() for each in chunks for router in each["decoder"]["layers"]]


def counts(model: Any) -> list[list[float]]:
    return [router.local_tokens_per_expert.tolist() for router in model["decoder"]["layers"]]


# ---- when they change


def change_at_once(*_: Any) -> None:
    raise AssertionError("biases wait for the step")


def reset(config: Any, model: Any) -> None:
    assert not config.moe_router_enable_expert_bias, "forgets the counts"


def test_megatron_itself_sums_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it calls as it finishes gradients: the sums stay for the step, and biases are what they were."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: tensor.mul_(2))
    model = chunk()
    sum_only(change_at_once)([model], model.config, tp_dp_cp_group="replicas")
    keep_counts(reset)(model.config, [model])
    assert counts(model) == [[2 * each for each in counted] for counted in COUNTS]
    assert biases(model) == [[0.0] * EXPERTS] * 2


@pytest.mark.parametrize("skipped", [False, True])
def test_a_step_changes_them_once_also_if_it_is_skipped(skipped: bool) -> None:
    model = chunk()
    runtime: Any = SimpleNamespace(
        held=SimpleNamespace(live=trained(model), shards=(SHARD,), kept=None, copy=None, extra=ExtraState()),
        progress=SimpleNamespace(stage=None), job=SimpleNamespace(args=SimpleNamespace(qk_clip=False)),
        mode=SimpleNamespace(step=lambda optimizer: None, averaging=None),
    )  # fmt: skip
    runtime.held.live.optimizer.get_parameters = list
    runtime.held.live.optimizer.prepare_grads = lambda: None
    runtime.held.live.optimizer.config = SimpleNamespace(clip_grad=0.0)
    take_step(runtime, SimpleNamespace(skipped=skipped, grad_norm=1.0))  # type: ignore[arg-type]
    assert biases(model) == CHANGED
    runtime.held.shards = ()  # whose objects are of an earlier epoch
    take_step(runtime, SimpleNamespace(skipped=True, grad_norm=None))  # type: ignore[arg-type]
    assert biases(model) == CHANGED


def test_an_attempt_counts_from_zero() -> None:
    model = chunk()
    begin_counting([model])
    assert counts(model) == [[0.0] * EXPERTS] * 2


@pytest.mark.parametrize("seed", range(5))
def test_the_rule_is_megatrons(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: None)
    torch.manual_seed(seed)
    model = chunk([torch.randint(0, 1000, (EXPERTS,)).tolist() for _ in range(2)])
    for router in model["decoder"]["layers"]:
        router.expert_bias.copy_(torch.randn(EXPERTS))
    tokens, before = torch.tensor(counts(model)), torch.tensor(biases(model))
    expected = get_updated_expert_bias(tokens, before, RATE, tp_dp_cp_group="replicas")  # type: ignore[arg-type]
    change_biases([model])
    assert biases(model) == expected.tolist()


def test_a_mean_that_32_bits_would_round_decides_nothing() -> None:
    """2 ** 24 + 1 is no 32-bit number; the mean is a quarter more than 2 ** 24."""
    model = chunk([[2.0**24, 2.0**24, 2.0**24, 2.0**24 + 2], [2.0**24] * 4])
    change_biases([model])
    assert biases(model) == [[RATE, RATE, RATE, -RATE], [0.0] * 4]


def test_counts_are_exact_in_16_bit_models() -> None:
    """Megatron's wrapper narrows buffers: 257 tokens would be 256."""
    model = chunk().bfloat16()
    count_exactly([model])
    begin_counting([model])
    for router in model["decoder"]["layers"]:
        router.local_tokens_per_expert += torch.tensor([257, 0, 0, 0])
        assert router.expert_bias.dtype == torch.float32
    assert counts(model) == [[257.0, 0.0, 0.0, 0.0]] * 2


def test_jobs_without_the_flag_look_for_none() -> None:
    model = chunk(enabled=False)
    model.modules = None
    for each in (begin_counting, count_exactly, change_biases):
        each([model])
        each([])


def test_a_standby_gets_all_counts_at_once() -> None:
    model = chunk([[0.0] * EXPERTS] * 2)
    share_counts([model], lambda together: together.copy_(torch.tensor(COUNTS).flatten()))
    assert counts(model) == COUNTS


# ---- where they are


def test_counts_are_summed_with_the_gradients_of_their_layer_and_counted_in_no_norm() -> None:
    plan = ParallelPlan((Replica(((0,),), (0,), (Chunk(0, 0, 4),)), Replica(((1,),), (1,), (Chunk(0, 0, 4),))))
    model = chunk()
    shares = SliceShares(plan, 0, None)
    assert not any(gradient_views([model], shares).values())
    views = summed_views([model], shares)
    [(name, view)] = views[Slice(1, WHOLE)]
    view += 1
    assert (name, counts(model)[0]) == ("local_tokens_per_expert", [each + 1 for each in COUNTS[0]])


def test_a_shard_has_biases_and_no_counts() -> None:
    old, new = trained(chunk()), trained(chunk([[7.0] * EXPERTS] * 2))
    change_biases(old.model)
    assert [name.rpartition(".")[2] for name in shard_tensors(old)] == ["expert_bias"] * 2
    fill_shard(new, shard_tensors(old), [])
    assert biases(*new.model) == CHANGED
    assert counts(new.model[0]) == [[7.0] * EXPERTS] * 2


@pytest.mark.parametrize("through_host", [False, True])
def test_slices_have_them_too(through_host: bool) -> None:
    old, new = trained(chunk()), trained(chunk())
    change_biases(old.model)
    states = slice_states(old, [SHARD], 2, None)
    assert {f"{piece}": list(state) for piece, state in states.items() if state} == {
        "1/-1": ["buffer/expert_bias"], "2/-1": ["buffer/expert_bias"],
    }  # fmt: skip
    filler = HostFiller() if through_host else _Filler(new)
    for piece, parts in Holding(new, [SHARD], 2, None).pieces.items():
        filler.fill(parts, states[piece])
    if isinstance(filler, HostFiller):
        layers = new.model[0]["decoder"]["layers"]  # type: ignore[index]
        assert [filler.whole.states[id(each.expert_bias)]["buffer"].tolist() for each in layers] == CHANGED
    else:
        assert biases(*new.model) == CHANGED


def test_digests_of_slices_tell_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_: tensor)
    one, other = trained(chunk()), trained(chunk())
    before = Holding(one, [SHARD], 1, None).digests()
    assert before == Holding(other, [SHARD], 1, None).digests()
    change_biases(one.model)
    assert {key for key, digest in Holding(one, [SHARD], 1, None).digests().items() if before[key] != digest} == {
        "1/-1/1", "2/-1/1",
    }  # fmt: skip


def test_parts_of_an_optimizer_come_with_them() -> None:
    old, new = trained(chunk()), trained(chunk())
    change_biases(old.model)
    fill_buffers(new, {where: entry.tensors for where, entry in whole_buffers(old).items()})
    assert biases(*new.model) == CHANGED
    assert sorted(map(len, map(list, states_of(new).values()))) == [1, 1]


# ---- quantiles


class Balanced(torch.nn.Module):
    """What of Megatron's router is about quantiles: after two micro-batches, of which it keeps the sum."""

    _maintain_float32_expert_bias = TopKRouter._maintain_float32_expert_bias

    def __init__(self, config: Any, quantiles: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("qb_beta", torch.tensor([1.0, -1.0, 0.5, -0.5]))
        self.register_buffer("qb_beta_accum", quantiles.sum(dim=0), persistent=False)
        self.register_buffer("qb_beta_count", torch.tensor(len(quantiles)), persistent=False)


def balanced(quantiles: torch.Tensor, ema: float = 0.0) -> Any:
    """A layer. `quantiles`: of its scores in each micro-batch."""
    config = SimpleNamespace(
        moe_router_enable_expert_bias=False, moe_router_load_balancing_type="quantile_balancing",
        moe_router_quantile_balancing_ema=ema,
    )  # fmt: skip
    layers = torch.nn.ModuleList([Balanced(config, quantiles)])
    model: Any = torch.nn.ModuleDict({"decoder": torch.nn.ModuleDict({"layers": layers})})
    model.config = config
    return model


def router_of(model: Any) -> Any:
    return model["decoder"]["layers"][0]


@pytest.mark.parametrize("ema", [0.0, 0.3])
def test_the_rule_for_quantiles_is_megatrons_however_micro_batches_are_dealt_out(
    monkeypatch: pytest.MonkeyPatch, ema: float
) -> None:
    """Megatron's, of two replicas with as many; ours of three and one."""
    finishing = pytest.importorskip("megatron.core.distributed.finalize_model_grads")
    if not hasattr(finishing, "_update_router_qb_beta"):
        pytest.skip("this Megatron has no quantile balancing")
    quantiles = torch.randn(4, EXPERTS, generator=torch.Generator().manual_seed(1))
    stock, other = balanced(quantiles[:2], ema), quantiles[2:].mean(dim=0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda mean, op, group: mean.add_(other).div_(2))
    finishing._update_router_qb_beta([stock], stock.config, dp_cp_group="replicas")
    ours, alone = balanced(quantiles[:3], ema), torch.cat([quantiles[3], torch.ones(1)])
    count_exactly([ours])
    before = router_of(ours).qb_beta.clone()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums, group: sums.add_(alone))
    sum_quantiles(change_at_once)([ours], ours.config, dp_cp_group="replicas")
    keep_counts(change_at_once)(ours.config, [ours])
    assert torch.equal(router_of(ours).qb_beta, before)
    change_biases([ours])
    assert torch.allclose(router_of(ours).qb_beta, router_of(stock).qb_beta, atol=1e-6)


@pytest.mark.since_megatron("0.19")
def test_an_attempt_sums_quantiles_from_zero_in_32_bits() -> None:
    model = balanced(torch.ones(2, EXPERTS)).bfloat16()
    count_exactly([model])
    router = router_of(model)
    assert {router.qb_beta.dtype, router.qb_beta_accum.dtype, router.qb_beta_count.dtype} == {torch.float32}
    begin_counting([model])
    assert not router.qb_beta_accum.any() and not router.qb_beta_count.any()


def test_sums_of_quantiles_go_with_the_gradients_and_are_no_part_of_a_shard() -> None:
    plan = ParallelPlan((Replica(((0,),), (0,), (Chunk(0, 0, 4),)), Replica(((1,),), (1,), (Chunk(0, 0, 4),))))
    model = balanced(torch.ones(2, EXPERTS))
    count_exactly([model])
    views = dict(summed_views([model], SliceShares(plan, 0, None))[Slice(1, WHOLE)])
    assert {name: view.tolist() for name, view in views.items()} == {
        "qb_beta_accum": [2.0] * EXPERTS, "qb_beta_count": [2.0],
    }  # fmt: skip
    views["qb_beta_count"] += 1
    assert router_of(model).qb_beta_count == 3
    assert [name.rpartition(".")[2] for name in shard_tensors(trained(model))] == ["qb_beta"]
    views["qb_beta_accum"] += 1
    share_counts([model], lambda counts: counts.zero_(), TOKENS)
    assert router_of(model).qb_beta_accum.tolist() == [3.0] * EXPERTS, "members of a stage have the same"
