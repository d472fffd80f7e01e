# SPDX-License-Identifier: Apache-2.0
"""Seconds of ops on a device of known peak, and the iteration time that no plan can beat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resihp.cost.bounds import iteration_bound
from megatron_resihp.cost.device import Device, durations, layer_work, transfers
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS, preset
from megatron_resihp.cost.training import (
    Recompute,
    Training,
    training_from_arguments,
    why_equal_rounds,
    why_even_experts,
    why_own_context,
    why_own_degree,
    why_own_experts,
)
from megatron_resihp.pipeline.schedules import one_f_one_b, zero_bubble_h1
from megatron_resihp.pipeline.search.bounds import makespan_lower_bound
from megatron_resihp.pipeline.simulate import simulate
from megatron_resihp.plan import Chunk, Replica, Schedule

MODEL = model_from_arguments({**PRESETS["llama2-7b"], "num_layers": 6})
TRAINING = Training(4096, sequence_parallel=True)
DEVICE = Device(312e12, 0.5, {1: 1.0, 2: 0.95, 4: 0.9, 8: 0.8})
F, B, W = range(3)


class TestWork:
    def test_of_a_llama_layer_by_hand(self) -> None:
        work = layer_work(MODEL, TRAINING, 1)
        products = 2 * (4 * 4096**2 + 3 * 4096 * 11008)
        assert work[:, 1].tolist() == [[products, 2 * 4096], [products, 4 * 4096], [products, 0]]
        assert work[:, 0].tolist() == [[0, 0]] * 3
        assert work[:, -1].tolist() == [[2 * 4096 * 32000, 0]] * 3

    @pytest.mark.parametrize(
        ("recompute", "share"), [(Recompute.NONE, 0), (Recompute.SELECTIVE, 1), (Recompute.FULL, 1)]
    )
    def test_recomputation_counts_to_the_backward(self, recompute: Recompute, share: int) -> None:
        plain, again = (layer_work(MODEL, replace(TRAINING, recompute=each), 1) for each in (Recompute.NONE, recompute))
        extra = again[B] - plain[B]
        assert extra[1, 1] == share * plain[F, 1, 1]
        assert extra[1, 0] == (plain[F, 1, 0] if recompute is Recompute.FULL else 0)
        assert not extra[-1].any(), "the head is never computed again"

    @given(degree=st.integers(1, 8), name=st.sampled_from(["llama2-70b", "qwen2.5-14b", "nemotron-h-8b"]))
    @settings(max_examples=15)
    def test_members_share_it_out_and_rank_0_has_most(self, degree: int, name: str) -> None:
        model = preset(name)
        each = [layer_work(model, TRAINING, degree, tp_rank) for tp_rank in range(degree)]
        assert np.allclose(sum(each), layer_work(model, TRAINING, 1))
        assert all((each[0] >= other).all() for other in each)


@pytest.mark.parametrize(("sequence_parallel", "degrees"), [(True, (1, 2)), (False, (1,))])
def test_megatron_cuts_experts_only_beside_the_sequence(sequence_parallel: bool, degrees: tuple[int, ...]) -> None:
    arguments = {"seq_length": 4096, "num_experts": 4, "sequence_parallel": sequence_parallel}
    assert JobCost(MODEL, training_from_arguments(arguments), DEVICE, 8, workers_per_node=2).degrees == degrees


@pytest.mark.parametrize(
    ("flags", "distributed"),
    [
        ({"optimizer": "muon"}, False),
        ({"optimizer": "muon", "use_distributed_optimizer": True}, True),
        ({"optimizer": "dist_muon"}, True),
        ({"optimizer": "muon", "use_layer_wise_distributed_optimizer": True}, True),
    ],
)
def test_muon_is_shared_out_as_given_and_as_megatron_says_then(flags: dict[str, Any], distributed: bool) -> None:
    assert training_from_arguments({"seq_length": 4096, **flags}).distributed_optimizer == distributed


@pytest.mark.parametrize("own", [1, 2])
def test_muon_trains_the_same_in_the_jobs_own_cuts_only(own: int) -> None:
    arguments = {"seq_length": 4096, "optimizer": "muon", "tensor_model_parallel_size": own}
    assert JobCost(MODEL, training_from_arguments(arguments), DEVICE, 8, workers_per_node=4).degrees == (own,)


@pytest.mark.parametrize(("sequence_parallel", "keeps"), [(False, True), (True, False)])
def test_latent_attention_trains_the_same_in_other_cuts_only_beside_sequence_parallelism(
    sequence_parallel: bool, keeps: bool
) -> None:
    assert bool(why_own_degree({"multi_latent_attention": True, "sequence_parallel": sequence_parallel})) == keeps


@pytest.mark.parametrize(
    ("layers", "backend", "keeps"),
    [("local", "nccl", True), ("transformer_engine", "nccl", False), ("local", "gloo", False)],
)
def test_latent_attention_in_megatrons_own_layers_trains_otherwise_in_other_cuts(
    layers: str, backend: str, keeps: bool
) -> None:
    """The stand-in for CPUs mends it."""
    latent = {"multi_latent_attention": True, "sequence_parallel": True}
    assert bool(why_own_degree(latent | {"transformer_impl": layers, "distributed_backend": backend})) == keeps


@pytest.mark.parametrize(
    ("ways", "own", "tokens", "keeps"),
    [
        ("a2a", 8, 40_960, True), (["p2p", "a2a"], 8, 12_288, True), ("a2a", 8, 32_768, False),
        ("p2p", 8, 40_960, False), (["p2p"], 8, 40_960, False), (None, 8, 40_960, False), ("a2a", 1, 40_960, False),
    ],
)  # fmt: skip
def test_sequences_whose_heads_are_dealt_out_are_shared_by_divisors_of_the_jobs_own_number(
    ways: Any, own: int, tokens: int, keeps: bool
) -> None:
    """Five could share 40,960 tokens, but not the heads of eight."""
    arguments = {"cp_comm_type": ways, "context_parallel_size": own, "seq_length": tokens}
    assert bool(why_own_context(arguments)) == keeps


@pytest.mark.parametrize(("recipe", "keeps"), [("tensorwise", True), ("blockwise", False), ("mxfp8", False)])
def test_scales_of_eight_bits_are_those_of_what_a_member_holds(recipe: str, keeps: bool) -> None:
    assert bool(why_own_degree({"fp8": "hybrid", "fp8_recipe": recipe})) == keeps
    assert not why_own_degree({"fp8": None, "fp8_recipe": recipe})


def test_scales_of_eight_bits_are_those_of_the_tokens_that_meet() -> None:
    assert why_own_experts({"fp8": "hybrid", "num_experts": 4})
    assert not why_own_experts({"fp8": None, "num_experts": 4}) and not why_own_experts({"fp8": "hybrid"})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"num_experts": 4}, ""), ({"overlap_moe_expert_parallel_comm": True}, "in turns with another"),
        ({"fp8": "hybrid", "num_experts": 4}, "8-bit scales"), ({"moe_expert_capacity_factor": 1.0}, ""),
    ],
)  # fmt: skip
def test_rounds_that_count_nothing_are_calls_of_their_own(arguments: dict[str, Any], why: str) -> None:
    found = why_equal_rounds(arguments)
    assert why in found and bool(found) == bool(why)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"num_experts": 8, "moe_router_load_balancing_type": ["aux_loss"]}, ""),
        ({"overlap_moe_expert_parallel_comm": True}, "in turns with another"),
        ({"moe_grouped_gemm": True}, ""),
        ({"moe_grouped_gemm": True, "fp8": "hybrid", "num_experts": 8}, "8-bit scales"),
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances"),
        ({"context_parallel_size": 2}, "context parallelism"),
        ({"ddp_num_buckets": 5, "overlap_grad_reduce": True}, "how its gradients are cut"),
        ({"num_experts": 8, "ddp_average_in_collective": True}, "--ddp-average-in-collective"),
    ],
)
def test_where_experts_are_dealt_in_equal_numbers_only(arguments: dict[str, Any], why: str) -> None:
    found = why_even_experts(arguments)
    assert why in found and bool(found) == bool(why)


def test_fused_experts_are_whole() -> None:
    experts = {"num_experts": 4, "sequence_parallel": True}
    assert why_own_degree(experts | {"use_transformer_engine_op_fuser": True}) and not why_own_degree(experts)


class TestDurations:
    stages = Replica(((0, 1, 2, 3), (4, 5)), (0, 1), (Chunk(0, 0, 4), Chunk(1, 4, 8)))

    def test_by_hand(self) -> None:
        times = durations(self.stages, MODEL, TRAINING, DEVICE, [4096, 2048], [4096**2, 2048 * 1024])
        products = 2 * (4 * 4096**2 + 3 * 4096 * 11008)
        rate = 312e12 * 0.5
        assert times[F, 0, 0] == pytest.approx(3 * (products * 4096 + 2 * 4096 * 4096**2) / 4 / (rate * 0.9))
        assert times[F, 0, 1] == pytest.approx(3 * (products * 2048 + 2 * 4096 * 2048 * 1024) / 4 / (rate * 0.9))
        head = 2 * 4096 * 32000 * 4096
        assert times[B, 1, 0] == pytest.approx(
            (3 * (2 * products * 4096 + 4 * 4096 * 4096**2) + 2 * head) / 2 / (rate * 0.95)
        )
        assert not times[W].any()

    def test_a_slow_member_slows_its_stage_only(self) -> None:
        healthy, slow = (
            durations(self.stages, MODEL, TRAINING, DEVICE, [4096], [4096**2], speed) for speed in ({}, {2: 0.5})
        )
        assert slow[:, 0] == pytest.approx(2 * healthy[:, 0]) and (slow[:, 1] == healthy[:, 1]).all()

    def test_the_backward_is_split_where_the_schedule_splits_it(self) -> None:
        whole, split = (
            durations(replace(self.stages, schedule=Schedule(name)), MODEL, TRAINING, DEVICE, [4096], [0])
            for name in ("1f1b", "zero-bubble-h1")
        )
        assert whole[B] == pytest.approx(split[B] + split[W]) and (split[W] > 0).all()
        engine = replace(TRAINING, splits_backward=False)
        zero_bubble = replace(self.stages, schedule=Schedule("zero-bubble-h1"))
        assert (durations(zero_bubble, MODEL, engine, DEVICE, [4096], [0]) == whole).all()

    def test_a_degree_between_known_ones(self) -> None:
        assert DEVICE.rate(3) == pytest.approx(312e12 * 0.5 * 0.925) and DEVICE.rate(16) == DEVICE.rate(8)

    def test_a_transfer_goes_over_as_many_lanes_as_the_larger_group_has(self) -> None:
        device = replace(DEVICE, latency=1e-5, bandwidth=25e9)
        times = transfers(self.stages, MODEL, device, [4096])
        assert times.shape == (2, 1, 1) and times[0, 0, 0] == pytest.approx(1e-5 + 2 * 4096 * 4096 / 4 / 25e9)


class TestBound:
    @given(
        degrees=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        micro_batches=st.integers(1, 6),
        zero_bubble=st.booleans(),
        data=st.data(),
    )
    @settings(max_examples=40, deadline=None)
    def test_no_pipeline_beats_it(
        self, degrees: list[int], micro_batches: int, zero_bubble: bool, data: st.DataObject
    ) -> None:
        numbers = iter(range(100))
        stages = tuple(tuple(next(numbers) for _ in range(degree)) for degree in degrees)
        cuts = sorted(data.draw(st.lists(st.integers(0, 8), min_size=len(degrees) - 1, max_size=len(degrees) - 1)))
        chunks = tuple(Chunk(n, *ends) for n, ends in enumerate(zip([0, *cuts], [*cuts, 8], strict=True)))
        speed = {worker: data.draw(st.floats(0.1, 1.0)) for members in stages for worker in members}
        squares = data.draw(st.integers(1, 4096**2))
        schedule = Schedule("zero-bubble-h1" if zero_bubble else "1f1b")
        replica = Replica(stages, tuple(range(micro_batches)), chunks, schedule)
        tokens = [TRAINING.tokens] * micro_batches
        times = durations(replica, MODEL, TRAINING, DEVICE, tokens, [squares] * micro_batches, speed)
        program = (zero_bubble_h1 if zero_bubble else one_f_one_b)(len(stages), micro_batches)
        bound = iteration_bound(JobCost(MODEL, TRAINING, DEVICE, micro_batches, squares=squares), speed)
        assert bound.seconds <= simulate(program, times).makespan * (1 + 1e-9)
        assert bound.seconds <= makespan_lower_bound(range(len(stages)), times, 0.0, zero_bubble) * (1 + 1e-9)

    def test_is_met_by_one_worker(self) -> None:
        replica = Replica(((0,),), (0, 1))
        times = durations(replica, MODEL, TRAINING, DEVICE, [4096, 4096], [4096**2, 4096**2], {0: 0.5})
        bound = iteration_bound(JobCost(MODEL, TRAINING, DEVICE, 2), {0: 0.5})
        assert bound.seconds == pytest.approx(times.sum())

    def test_is_the_critical_path_where_there_are_many_workers(self) -> None:
        bound = iteration_bound(JobCost(MODEL, TRAINING, DEVICE, 1), dict.fromkeys(range(64), 1.0))
        assert bound.seconds == bound.critical_path > bound.work

    def test_memory_that_cannot_hold_the_model(self) -> None:
        parameters = 18 * MODEL.parameters
        for workers, fits in ((4, True), (3, False)):
            device = replace(DEVICE, memory=-(-parameters // 4))
            bound = iteration_bound(JobCost(MODEL, TRAINING, device, 1), dict.fromkeys(range(workers), 1.0))
            assert bound.fits is fits and (bound.seconds < float("inf")) is fits
