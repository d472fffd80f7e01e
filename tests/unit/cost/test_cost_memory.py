# SPDX-License-Identifier: Apache-2.0
"""Memory of a plan's workers, beside arithmetic by hand and Megatron's own report."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.coding import decode
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import MemoryUse, check_plan, memory_of, with_layers
from megatron_resihp.cost.model.layers import Model, model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS, preset
from megatron_resihp.cost.room import check_change, peak_of_change, put_together, usable
from megatron_resihp.cost.training import Recompute, Training, TrainingError, training_from_arguments
from megatron_resihp.plan import (
    Chunk,
    Coordinate,
    OwnSplit,
    ParallelPlan,
    PlanError,
    Replica,
    Schedule,
    Shard,
    deal,
    even_chunks,
    spelled_out,
)
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.simulator.sizes import a100

GPT: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 2048, "vocab_size": 1024,
    "padded_vocab_size": 1024, "bf16": True, "position_embedding_type": "rope", "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "normalization": "RMSNorm", "seq_length": 256, "micro_batch_size": 2,
    "sequence_parallel": True, "recompute_granularity": "selective",
}  # fmt: skip
MODEL = model_from_arguments(GPT)
TRAINING = training_from_arguments(GPT)
LAYER = 4 * 512 * 512 + 2 * 512 * 2048 + 2 * 512
EMBEDDING = 1024 * 512
TOKENS = 2 * 256


def uniform(tp: int, pp: int, replicas: int, micro_batches: int, **more: Any) -> ParallelPlan:
    hands = deal([micro_batches] * replicas)
    numbers = iter(range(tp * pp * replicas))
    stages = [tuple(tuple(next(numbers) for _ in range(tp)) for _ in range(pp)) for _ in range(replicas)]
    return ParallelPlan(tuple(Replica(each, hand, **more) for each, hand in zip(stages, hands, strict=True)))


OWN = OwnSplit(even_chunks(8, 2), 1)
"""Two stages of one worker each."""
SHARED = replace(TRAINING, distributed_optimizer=True, shared_by=OWN)
UNLIKE = uniform(1, 2, 2, 4, chunks=(Chunk(0, 0, 4), Chunk(1, 4, 10)))
"""Replicas of two stages, with layers that are not the job's own."""


def megatrons(tp: int, pp: int, dp: int, distributed: bool, vpp: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        **GPT, kv_channels=64, group_query_attention=False, num_query_groups=8, num_experts=None, swiglu=False,
        moe_shared_expert_intermediate_size=None, mtp_num_layers=None, multi_latent_attention=False,
        moe_latent_size=None, expert_tensor_parallel_size=1, expert_model_parallel_size=1,
        pipeline_model_parallel_size=pp, tensor_model_parallel_size=tp, world_size=tp * pp * dp,
        data_parallel_size=dp, use_distributed_optimizer=distributed, virtual_pipeline_model_parallel_size=vpp,
    )  # fmt: skip


class TestState:
    def test_of_a_worker_by_hand(self) -> None:
        use = memory_of(uniform(2, 2, 2, 4), MODEL, TRAINING)[0]
        # Four of eight layers and the embedding, each halved but for the two norms of a layer.
        parameters = 4 * ((LAYER - 1024) // 2 + 1024) + EMBEDDING // 2
        assert (use.weights, use.gradients, use.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)

    @pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 4), (2, 4, 2), (4, 2, 1)])
    @pytest.mark.parametrize("distributed", [False, True])
    def test_as_megatron_reports_it_for_the_first_stage(self, tp: int, pp: int, dp: int, distributed: bool) -> None:
        report = pytest.importorskip("megatron.training.theoretical_memory_usage")
        training = replace(TRAINING, distributed_optimizer=distributed)
        use = memory_of(uniform(tp, pp, dp, pp), MODEL, training)[0]
        reported = report.compute_weight_and_optimizer_memory(megatrons(tp, pp, dp, distributed))
        # Megatron shares the final norm out over the stages; here it is the head's.
        final_norm = 0 if pp == 1 else 512 * (6 + 12 / dp if distributed else 18) / pp
        assert use.weights + use.gradients + use.optimizer + final_norm == pytest.approx(reported, abs=3)

    def test_of_tied_embeddings_is_held_at_both_ends(self) -> None:
        model = model_from_arguments({**GPT, "untie_embeddings_and_output_weights": False})
        ends = memory_of(uniform(1, 2, 1, 2), model, TRAINING)
        assert ends[1].weights - ends[0].weights == 2 * 512
        whole = memory_of(uniform(1, 1, 1, 1), model, TRAINING)[0]
        assert whole.weights == 2 * model.parameters == 2 * (8 * LAYER + EMBEDDING + 512)

    def test_of_standbys_is_that_of_the_shard_they_keep(self) -> None:
        plan = replace(uniform(2, 2, 1, 2), standbys={8: Coordinate(1, 0), 9: None})
        used = memory_of(plan, MODEL, TRAINING)
        assert used[8] == replace(used[2], activations=0, working=0)
        assert used[9].total == 0

    def test_in_fp32(self) -> None:
        training = training_from_arguments({**GPT, "bf16": False})
        use = memory_of(uniform(1, 1, 1, 1), MODEL, training)[0]
        assert use.weights == use.gradients == use.optimizer // 2 == 4 * MODEL.parameters

    @pytest.mark.parametrize(("replicas", "sharers"), [(4, 2), (2, 2), (3, 3), (1, 1)])
    def test_of_a_distributed_optimizer_in_two_instances(self, replicas: int, sharers: int) -> None:
        shared = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}
        use = memory_of(uniform(1, 1, replicas, replicas), MODEL, training_from_arguments({**GPT, **shared}))[0]
        assert use.optimizer == -(-12 * MODEL.parameters // sharers)

    @pytest.mark.parametrize(
        "plan", [UNLIKE, uniform(2, 1, 2, 4), uniform(2, 2, 2, 4)], ids=["layers", "stages", "degree"]
    )
    def test_of_a_distributed_optimizer_is_whole_where_megatron_s_own_groups_cannot_run_the_plan(
        self, plan: ParallelPlan
    ) -> None:
        """Replicas that differ can't share a part in the same way, and groups of another degree are not Megatron's."""
        plan = replace(plan, replicas=tuple(with_layers(replica, MODEL) for replica in plan.replicas))
        assert memory_of(plan, MODEL, SHARED) == memory_of(plan, MODEL, TRAINING)
        own = spelled_out(uniform(1, 2, 2, 4), OWN.chunks)
        anywhere = replace(SHARED, shared_by=None)
        assert memory_of(own, MODEL, SHARED) == memory_of(own, MODEL, anywhere) != memory_of(own, MODEL, TRAINING)
        idle = replace(own, standbys={4: (Shard(0, 6, 0, 1),)})
        assert memory_of(idle, MODEL, SHARED)[0] == memory_of(own, MODEL, SHARED)[0]

    def test_of_a_distributed_optimizer_is_whole_in_searches_for_other_layouts(self) -> None:
        cost, own = JobCost(MODEL, SHARED, a100(), 4), spelled_out(uniform(1, 2, 2, 4), OWN.chunks)
        whole, shared = (replace(cost, training=replace(SHARED, distributed_optimizer=each, shared_by=None))
                         for each in (False, True))  # fmt: skip
        assert (cost.bytes(1, 2).state == whole.bytes(1, 2).state).all()
        assert (cost.bytes(1, 2, own).state == shared.bytes(1, 2).state).all()
        assert (cost.bytes(1, 2, UNLIKE).state == whole.bytes(1, 2).state).all()
        together = replace(cost, sharings=(Sharing(1, 2), Sharing()))
        assert (together.bytes(1, 2).state == shared.bytes(1, 2).state).all(), "all of its plans have its own layout"

    def test_of_experts_that_workers_share_out(self) -> None:
        model, name = preset("deepseek-v2-lite"), "deepseek-v2-lite"
        experts = 26 * 64 * 3 * 2048 * 1408
        settings = {**PRESETS[name], "seq_length": 4096, "expert_model_parallel_size": 8}
        training = training_from_arguments({**settings, "use_distributed_optimizer": True})
        use = memory_of(uniform(1, 1, 16, 1), model, training)[0]
        other = model.parameters - experts
        assert use.weights == 2 * (other + experts // 8)
        # 16 workers share the optimizer state of the one kind, two hold the same experts of the other.
        assert use.optimizer == 12 * (other // 16 + experts // 8 // 2)
        twice = memory_of(uniform(1, 1, 16, 1), model, replace(training, optimizer_instances=2))[0]
        assert twice.optimizer == 12 * (other // 8 + experts // 8)
        three = memory_of(uniform(1, 1, 24, 1), model, replace(training, optimizer_instances=2))[0]
        assert three.optimizer == -(-12 * (other + experts) // 24), "three of each expert are in one instance"

    def test_of_the_worker_with_most_experts_where_their_numbers_differ(self) -> None:
        """Of 64 experts, the fullest of six workers has eleven."""
        model, name = preset("deepseek-v2-lite"), "deepseek-v2-lite"
        training = training_from_arguments({**PRESETS[name], "seq_length": 4096})
        plan = replace(uniform(1, 1, 6, 1), expert_parallel=6, uneven_experts=64)
        use, eleven = memory_of(plan, model, training)[0], 26 * 11 * 3 * 2048 * 1408
        assert use.weights == 2 * (model.parameters - 26 * 64 * 3 * 2048 * 1408 + eleven)
        alone = memory_of(replace(plan, expert_parallel=1, uneven_experts=0), model, training)[0]
        assert use.activations > alone.activations, "it gets tokens of 66 / 64 as many"


class TestActivations:
    @pytest.mark.parametrize(("limit", "waiting"), [(2, 2), (0, 8), (99, 8)])
    def test_of_the_head_wait_where_its_weight_gradients_are_left_for_later(self, limit: int, waiting: int) -> None:
        deferring = {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": limit}
        plan, training = uniform(1, 2, 1, 8), training_from_arguments({**GPT, **deferring})
        at_once, later = memory_of(plan, MODEL, TRAINING), memory_of(plan, MODEL, training)
        assert later[0] == at_once[0]
        alone = memory_of(uniform(1, 2, 1, 8), MODEL, replace(TRAINING, deferred=1))
        one = alone[1].activations - at_once[1].activations
        assert one > 2 * TOKENS * (1024 + 512) - 2
        assert later[1].activations - at_once[1].activations == pytest.approx(waiting * one, abs=waiting)

    def test_of_rounds_that_count_nothing_are_kept_too(self) -> None:
        """The second replica has one micro-batch, and runs three as the first does."""
        hands = ((0, 1, 2), (3,))
        rows = zip(uniform(1, 2, 2, 2).replicas, hands, strict=True)
        plan = ParallelPlan(tuple(replace(each, micro_batches=hand) for each, hand in rows), expert_parallel=2)
        shared, alone = (memory_of(each, MODEL, TRAINING) for each in (plan, replace(plan, expert_parallel=1)))
        assert shared[2] == shared[0] == alone[0] and alone[2].activations == alone[0].activations / 2

    @pytest.mark.parametrize(("tp", "pp", "micro_batches"), [(1, 1, 4), (2, 1, 1), (2, 4, 8), (4, 2, 8), (1, 8, 3)])
    def test_as_megatron_reports_them_for_the_first_stage(self, tp: int, pp: int, micro_batches: int) -> None:
        report = pytest.importorskip("megatron.training.theoretical_memory_usage")
        use = memory_of(uniform(tp, pp, 1, micro_batches), MODEL, TRAINING)[0]
        reported = report.compute_activation_memory(megatrons(tp, pp, 1, False), num_microbatches=micro_batches)
        assert use.activations == pytest.approx(reported, rel=1e-12, abs=1)

    def test_of_interleaving_are_as_megatron_reports_them(self) -> None:
        report = pytest.importorskip("megatron.training.theoretical_memory_usage")
        chunks = (Chunk(0, 0, 3), Chunk(1, 3, 5), Chunk(0, 5, 7), Chunk(1, 7, 10))
        plan = uniform(2, 2, 1, 4, chunks=chunks, schedule=Schedule("interleaved"))
        use = memory_of(plan, MODEL, TRAINING)[0]
        reported = report.compute_activation_memory(megatrons(2, 2, 1, False, vpp=2), num_microbatches=4)
        # In flight are five chunks of two layers, four of them with the embedding (after F of micro-batch 3 through
        # chunk 0); Megatron takes the embedding 2 · 1.25 times.
        embedding = TOKENS * (8 + 512) / 2
        assert use.activations - 4 * embedding == pytest.approx(reported - 2.5 * embedding, abs=1)

    def test_by_hand_with_each_recomputation(self) -> None:
        arguments = {**GPT, "attention_backend": "unfused"}
        plan = uniform(2, 2, 1, 4)
        uses = {}
        for granularity in (None, "selective", "full"):
            settings = {**arguments, "recompute_granularity": granularity}
            uses[granularity] = memory_of(plan, model_from_arguments(settings), training_from_arguments(settings))[0]
        embedding, layer, scores = TOKENS * (8 + 512), 34 * 512 * TOKENS, 5 * 8 * TOKENS * 256
        # Two micro-batches in flight, four layers and the embedding, halved by tensor and sequence parallelism.
        assert uses[None].activations == 2 * (4 * (layer + scores) + embedding) // 2
        assert uses["selective"].activations == 2 * (4 * layer + embedding) // 2
        assert uses["full"].activations == 2 * (4 * 2 * 512 * TOKENS + embedding) // 2
        again = (layer - 2 * 512 * TOKENS + scores) // 2
        assert [uses[each].working for each in (None, "selective", "full")] == [0, scores // 2, again]

    def test_follow_the_order_of_ops(self) -> None:
        plan = uniform(1, 1, 1, 2)
        peaks = []
        for order in ("F0.0 B0.0 F1.0 B1.0", "F0.0 F1.0 B0.0 B1.0", "F0.0 B0.0 F1.0 B1.0 W0.0 W1.0"):
            schedule = decode(Schedule, {"name": "explicit", "orders": [order]})
            replicas = (replace(plan.replicas[0], schedule=schedule),)
            peaks.append(memory_of(replace(plan, replicas=replicas), MODEL, TRAINING, kept_until_w=0.5)[0].activations)
        assert peaks == [peaks[0], 2 * peaks[0], 1.5 * peaks[0]]

    def test_zero_bubble_keeps_the_head_alive_as_often_as_the_embedding(self) -> None:
        one, zero = (
            memory_of(uniform(1, 4, 1, 8, schedule=Schedule(name)), MODEL, TRAINING)
            for name in ("1f1b", "zero-bubble-h1")
        )
        assert zero[0].activations == one[0].activations
        # With 1F1B the last stage has one micro-batch in flight, with W held back four.
        assert zero[3].activations == 4 * one[3].activations > one[0].activations


class TestUnevenPlans:
    plan = ParallelPlan(
        (
            Replica(((0, 1, 2), (3,)), (0, 2, 4), (Chunk(0, 0, 7), Chunk(1, 7, 10)), Schedule("1f1b")),
            Replica(((4, 5), (6,)), (1, 3), (Chunk(0, 0, 4), Chunk(1, 4, 10)), Schedule("1f1b")),
        ),
        {7: (Shard(1, 3, 1, 2),)},
        uneven_shards=True,
    )

    def test_members_hold_their_own_share(self) -> None:
        used = memory_of(self.plan, MODEL, TRAINING)
        head, columns, rows = 4 * 64 * 512, [683, 683, 682], [342, 341, 341]
        for rank, groups in enumerate((3, 3, 2)):
            layer = groups * head + columns[rank] * 2 * 512 + 2 * 512
            assert used[rank].weights == 2 * (6 * layer + rows[rank] * 512)
        assert used[0].activations > used[2].activations
        assert used[7].weights == 2 * 2 * ((LAYER - 1024) // 2 + 1024)

    @given(degrees=st.lists(st.integers(1, 8), min_size=1, max_size=4))
    def test_a_stage_holds_each_parameter_once(self, degrees: list[int]) -> None:
        numbers = iter(range(100))
        stages = tuple(tuple(next(numbers) for _ in range(degree)) for degree in degrees)
        counts = [10 // len(degrees)] * (len(degrees) - 1)
        ends = [sum(counts[:number]) for number in range(len(degrees))] + [10]
        chunks = tuple(Chunk(number, *ends[number : number + 2]) for number in range(len(degrees)))
        plan = ParallelPlan((Replica(stages, (0,), chunks),), uneven_shards=True)
        used = memory_of(plan, MODEL, TRAINING)
        norms = sum(
            (len(members) - 1) * 512 * (2 * 1 if layer.kind.startswith("trans") else layer.kind == "head")
            for members, chunk in zip(stages, chunks, strict=True)
            for layer in MODEL.layers[chunk.first : chunk.end]
        )
        assert sum(use.weights for use in used.values()) == 2 * (MODEL.parameters + norms)


class TestChecks:
    def check(self, plan: ParallelPlan, model: Model = MODEL, capacity: int = 10**12) -> None:
        check_plan(plan, model, TRAINING, capacity)

    def test_a_plan_that_fits(self) -> None:
        plan = uniform(2, 2, 2, 4)
        most = max(use.total for use in memory_of(plan, MODEL, TRAINING).values())
        self.check(plan, capacity=most)
        worst = next(w for w, use in memory_of(plan, MODEL, TRAINING).items() if use.total == most)
        with pytest.raises(PlanError, match=f"memory exceeded on worker {worst} by 7 bytes"):
            self.check(plan, capacity=most - 7)
        with pytest.raises(PlanError, match=f"memory exceeded on worker {worst} by 1.5 KiB"):
            self.check(plan, capacity=most - 1536)

    def test_each_worker_has_its_own_capacity(self) -> None:
        plan = uniform(1, 1, 2, 1)
        need = memory_of(plan, MODEL, TRAINING)[0].total
        with pytest.raises(PlanError, match="on worker 1 by 1 bytes"):
            check_plan(plan, MODEL, TRAINING, {0: need, 1: need - 1})

    def test_uneven_shards_have_to_be_marked(self) -> None:
        plan = replace(TestUnevenPlans.plan, uneven_shards=False)
        with pytest.raises(PlanError, match="unequal shards, and the plan isn't marked so"):
            self.check(plan)
        self.check(TestUnevenPlans.plan)

    def test_sequences_that_members_cannot_share(self) -> None:
        """GPT-2's twelve heads and padded vocabulary can be shared by three; its sequences can't."""
        model = model_from_arguments({
            "num_layers": 2, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024,
            "max_position_embeddings": 1024, "padded_vocab_size": 50688,
        })  # fmt: skip
        training = Training(sequence_length=1024)
        cost = JobCost(model=model, training=training, device=a100(), micro_batches=2, workers_per_node=4)
        assert not cost.uneven(3)
        assert replace(cost, training=replace(training, sequence_parallel=True)).uneven(3)

    def test_layers_are_those_of_the_model(self) -> None:
        with pytest.raises(PlanError, match="the plan has 10 layers, the model 34"):
            self.check(TestUnevenPlans.plan, preset("llama2-7b"))
        with pytest.raises(PlanError, match="8 layers can't be split evenly over 3 stages"):
            self.check(uniform(1, 3, 1, 1))

    def test_too_many_members_for_a_layer(self) -> None:
        with pytest.raises(PlanError, match="16 TP members can't share 8 query groups"):
            self.check(uniform(16, 1, 1, 1))

    def test_use_adds_up(self) -> None:
        assert MemoryUse(1, 2, 3, 4, 5).total == 15


class TestArguments:
    def test_recomputation(self) -> None:
        for change, expected in (
            ({"recompute_activations": True}, Recompute.SELECTIVE),
            ({"recompute_granularity": "selective"}, Recompute.SELECTIVE),
            ({"recompute_granularity": "full"}, Recompute.FULL),
        ):
            assert training_from_arguments({"seq_length": 8, **change}).recompute is expected

    def test_what_is_absent_is_as_megatron_has_it(self) -> None:
        expected = Training(8, weight_bytes=4, optimizer_bytes=8, splits_backward=False)
        assert training_from_arguments({"seq_length": 8}) == expected
        assert training_from_arguments({"seq_length": 8, "transformer_impl": "local"}).splits_backward

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"seq_length": None}, "seq_length is missing"),
            ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, "only core_attn"),
            ({"recompute_granularity": "full", "recompute_method": "block"}, "layer by layer"),
        ],
    )
    def test_what_is_not_modelled_is_refused(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(TrainingError, match=message):
            training_from_arguments({**GPT, **change})


class TestRoom:
    """For what is not a plan's: a part of the device, and the state before while another plan is built."""

    def test_a_part_of_each_device_is_kept_free(self) -> None:
        assert usable(100 << 30) == (92 * 2**30)
        assert a100(memory_gib=80.0).memory == usable(80 << 30)
        assert a100(memory_gib=80.0, reserve=0.0).memory == 80 << 30

    def test_old_and_new_state_are_there_together(self) -> None:
        before, after = uniform(1, 2, 1, 4), uniform(2, 1, 1, 4)
        held, wanted = (memory_of(plan, MODEL, TRAINING) for plan in (before, after))
        peak = peak_of_change(before, after, MODEL, TRAINING)
        assert peak == {worker: held[worker].state + wanted[worker].state for worker in range(2)}
        check_change(before, after, MODEL, TRAINING, max(peak.values()))
        with pytest.raises(PlanError, match=r"old and new state together take \d.* GiB on worker \d; .* may be used"):
            check_change(before, after, MODEL, TRAINING, max(peak.values()) - 1)

    def test_shards_that_stay_are_there_once(self) -> None:
        """Replica 1 is lost, or comes: worker 0 has what it had, whatever the host has room for."""
        before, after = uniform(1, 2, 2, 4), uniform(1, 2, 1, 4)
        state = {worker: use.state for worker, use in memory_of(after, MODEL, TRAINING).items()}
        assert peak_of_change(before, after, MODEL, TRAINING) == state
        assert peak_of_change(after, before, MODEL, TRAINING) == {
            worker: use.state for worker, use in memory_of(before, MODEL, TRAINING).items()
        }

    def test_parts_of_a_distributed_optimizer_are_built_anew(self) -> None:
        training = replace(TRAINING, distributed_optimizer=True)
        before, after = uniform(1, 2, 2, 4), uniform(1, 2, 1, 4)
        held, wanted = (memory_of(plan, MODEL, training) for plan in (before, after))
        peak = peak_of_change(before, after, MODEL, training)
        assert peak == {worker: held[worker].state + wanted[worker].state for worker in after.members}

    def test_parts_of_a_distributed_optimizer_are_put_together_on_the_host(self) -> None:
        """Into a plan whose workers have all of the state, and on the way out of one."""
        own = spelled_out(uniform(1, 2, 2, 4), OWN.chunks)
        whole = {w: use.weights + use.optimizer for w, use in memory_of(own, MODEL, TRAINING).items()}
        assert put_together(own, UNLIKE, MODEL, SHARED) == put_together(UNLIKE, own, MODEL, SHARED) == whole
        for before, after in ((own, UNLIKE), (UNLIKE, own)):
            for enough in (0, max(whole.values())):  # 0: nothing is known of the host
                check_change(before, after, MODEL, SHARED, 10**12, enough)
            with pytest.raises(
                PlanError, match=r"parts of the optimizer's state take .* of host memory on worker \d; "
            ):
                check_change(before, after, MODEL, SHARED, 10**12, max(whole.values()) - 1)
        assert put_together(own, own, MODEL, SHARED) == put_together(UNLIKE, UNLIKE, MODEL, SHARED) == {}
        alone = ParallelPlan((replace(own.replicas[0], micro_batches=(0, 1, 2, 3)),), dict.fromkeys((2, 3)))
        assert put_together(UNLIKE, alone, MODEL, SHARED).keys() == {0, 1}, "others build nothing"

    def test_what_is_put_together_on_the_host_leaves_less_room_for_the_old_state(self) -> None:
        own = spelled_out(uniform(1, 2, 2, 4), OWN.chunks)
        held, put = memory_of(own, MODEL, SHARED), put_together(own, UNLIKE, MODEL, SHARED)
        most = max(held[worker].state - held[worker].gradients + put[worker] for worker in held)
        roomy, short = (peak_of_change(own, UNLIKE, MODEL, SHARED, host) for host in (most, max(put.values())))
        new = memory_of(UNLIKE, MODEL, SHARED)
        assert roomy == {worker: max(held[worker].state, new[worker].state) for worker in held}
        assert short == {worker: held[worker].state + new[worker].state for worker in held}

    def test_slices_of_a_whole_distributed_optimizer_that_stay_are_there_once(self) -> None:
        other = replace(
            UNLIKE, replicas=tuple(replace(r, chunks=(Chunk(0, 0, 3), Chunk(1, 3, 10))) for r in UNLIKE.replicas)
        )
        assert peak_of_change(UNLIKE, other, MODEL, SHARED) == peak_of_change(UNLIKE, other, MODEL, TRAINING)

    def test_an_old_state_that_fits_into_host_memory_takes_no_room(self) -> None:
        """Its gradients are of no use any more, and move nowhere."""
        before, after = uniform(1, 2, 1, 4), uniform(2, 1, 1, 4)
        held, wanted = (memory_of(plan, MODEL, TRAINING) for plan in (before, after))
        moved = max(use.state - use.gradients for use in held.values())
        larger = {worker: max(held[worker].state, wanted[worker].state) for worker in range(2)}
        assert peak_of_change(before, after, MODEL, TRAINING, moved) == larger
        check_change(before, after, MODEL, TRAINING, max(larger.values()), moved)
        with pytest.raises(PlanError, match="old and new state together"):
            check_change(before, after, MODEL, TRAINING, max(larger.values()), moved - 1)

    def test_who_gets_no_work_builds_nothing(self) -> None:
        before = uniform(1, 1, 2, 4)
        alone = ParallelPlan((Replica(((0,),), (0, 1, 2, 3)),), {1: Coordinate(0, 0)})
        state = memory_of(before, MODEL, TRAINING)[0].state
        assert peak_of_change(before, alone, MODEL, TRAINING) == {0: state, 1: state}

    def test_who_comes_holds_nothing_yet(self) -> None:
        before, after = uniform(1, 1, 1, 4), uniform(1, 1, 2, 4)
        state = memory_of(before, MODEL, TRAINING)[0].state
        assert peak_of_change(before, after, MODEL, TRAINING) == {0: state, 1: state}
