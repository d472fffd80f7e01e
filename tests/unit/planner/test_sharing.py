# SPDX-License-Identifier: Apache-2.0
"""Replicas that share experts or sequences: how long they take, what no plan of theirs beats, what they must move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import ParallelPlan, Replica, Shard, even_chunks
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate, iteration_times, run_of
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.moves import bytes_to_move
from megatron_resihp.planner.strategies.common import require_state

EXPERTS = model_from_arguments({**PRESETS["mixtral-8x7b"], "num_layers": 4})
LONG = model_from_arguments({**PRESETS["llama3-405b"], "num_layers": 4})
DEVICE = Device(312e12, 0.5, latency=1e-5, bandwidth=25e9, node_bandwidth=300e9, memory=1 << 50)
COST = JobCost(EXPERTS, Training(4096), DEVICE, 8, 2, sharings=(Sharing(1, 4), Sharing(1, 2), Sharing()))
WELL = Health(dict.fromkeys(range(8), 1.0))
CHUNKS, WHOLE = even_chunks(4, 2), even_chunks(4, 1)


def node_of(worker: int) -> int:
    """Two workers are on each node."""
    return worker // 2


def plan_of(experts: int) -> ParallelPlan:
    """Four replicas of two stages; workers 2 s and 2 s + 1 are on one node."""
    replicas = (Replica(((r,), (4 + r,)), (2 * r, 2 * r + 1), CHUNKS) for r in range(4))
    return ParallelPlan(tuple(replicas), expert_parallel=experts)


class TestTime:
    def test_an_op_takes_what_its_slowest_member_takes_and_what_all_exchange(self) -> None:
        health = Health(dict(WELL.speed) | {1: 0.5})
        found = run_of(plan_of(4), 2, health, COST).seconds()
        shared = COST.shared(1, 4)
        alone, exchanged = (each[0, 0:3].sum() for each in (shared.seconds(1), shared.exchange(1, 2)))
        assert found[0, 0] == pytest.approx(alone / 0.5 + exchanged)
        assert found[0, 1] == pytest.approx(run_of(plan_of(4), 0, WELL, COST).seconds()[0, 1])

    def test_all_that_share_wait_for_one_and_others_do_not(self) -> None:
        slow = Health(dict(WELL.speed) | {1: 0.5})
        together, apart = (evaluate(plan_of(experts), slow, COST).replica_s for experts in (4, 2))
        assert len(together) == 1 and len(apart) == 2
        assert apart[0] > 1.3 * apart[1]

    def test_groups_inside_nodes_are_faster(self) -> None:
        inside = plan_of(2)
        order = (0, 2, 1, 3)
        across = replace(inside, replicas=tuple(replace(inside.replicas[r], micro_batches=(2 * n, 2 * n + 1))
                                                for n, r in enumerate(order)))  # fmt: skip
        assert evaluate(inside, WELL, COST).iteration_s < evaluate(across, WELL, COST).iteration_s

    def test_a_slow_link_inside_a_group_slows_what_is_exchanged(self) -> None:
        slow = Health(WELL.speed, {(0, 3): 0.5})
        well, found = (run_of(plan_of(4), 0, health, COST).seconds()[0] for health in (WELL, slow))
        assert found[0] - well[0] == pytest.approx(COST.shared(1, 4).exchange(1, 2)[0, 0:3].sum())
        assert found[1] == pytest.approx(well[1])

    def test_the_longest_documents_of_a_round_count(self) -> None:
        even = np.full((1, 8), COST.typical_squares)
        [typical] = iteration_times(plan_of(4), WELL, COST, even)
        assert typical == pytest.approx(evaluate(plan_of(4), WELL, COST).iteration_s)
        [one] = iteration_times(plan_of(4), WELL, COST, even + np.eye(1, 8) * 4 * COST.typical_squares)
        [whole_round] = iteration_times(plan_of(4), WELL, COST, even + (np.arange(8) % 2 == 0) * 4 * even)
        assert typical < one == pytest.approx(whole_round)

    def test_one_with_fewer_micro_batches_takes_as_long_as_one_with_most(self) -> None:
        hands = [(0, 1), (2, 3, 4), (5,), (6, 7)]
        uneven, even = (
            replace(plan_of(4), replicas=tuple(replace(each, micro_batches=hand)
                                               for each, hand in zip(plan_of(4).replicas, given, strict=True)))
            for given in (hands, [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)])
        )  # fmt: skip
        assert evaluate(uneven, WELL, COST).replica_s == evaluate(even, WELL, COST).replica_s
        squares = np.full((1, 8), COST.typical_squares)
        squares[:, 5] *= 4  # run in each of three rounds
        [again] = iteration_times(uneven, WELL, COST, squares)
        squares[:, 2:5] = squares[:, 5]
        assert [again] == pytest.approx(iteration_times(uneven, WELL, COST, squares))

    def test_those_that_share_sequences_each_do_a_part(self) -> None:
        cost = JobCost(LONG, Training(131072), DEVICE, 4, 4, sharings=(Sharing(4), Sharing(2), Sharing()))
        hands = [(0, 1, 2, 3)] * 4
        replicas = tuple(Replica(((r,), (4 + r,)), hands[r], CHUNKS) for r in range(4))
        shared = evaluate(ParallelPlan(replicas, context_parallel=4), WELL, cost)
        apart = evaluate(ParallelPlan(tuple(replace(each, micro_batches=(r,)) for r, each in enumerate(replicas))),
                         WELL, cost)  # fmt: skip
        # As much work, in more and shorter rounds, so with smaller bubbles.
        assert apart.iteration_s / 2 < shared.iteration_s < apart.iteration_s
        assert len(shared.replica_s) == 1


class TestBound:
    @pytest.mark.parametrize("experts", [1, 2, 4])
    def test_no_number_of_sharers_beats_it(self, experts: int) -> None:
        slow = Health(dict(WELL.speed) | {1: 0.5, 6: 0.8})
        assert 0.4 < evaluate(plan_of(experts), slow, COST).share_of_bound <= 1

    def test_it_counts_what_must_be_sent_where_memory_holds_no_other_number(self) -> None:
        of_replica = 18 * EXPERTS.parameters
        small = replace(COST, replica_workers=2, device=replace(DEVICE, memory=int(of_replica / 2 / 3)))
        free, bound = (evaluate(plan_of(4), WELL, each).bound for each in (COST, small))
        per_micro_batch = COST.shared(1, 4).exchange(1, 2).sum()
        assert bound.work - free.work == pytest.approx(8 / 8 * per_micro_batch)


class TestState:
    def test_fewer_sharers_lack_the_others_experts(self) -> None:
        one = 3 * 4096 * 14336 * 14  # weights and optimizer
        moved = bytes_to_move(plan_of(4), plan_of(2), COST)
        # Each has two of eight experts in two layers. Two of the four that it needs are its own, or none is.
        assert {round(each / one) for each in moved.values()} == {4, 8}
        assert not bytes_to_move(plan_of(4), plan_of(4), COST)

    def test_a_distributed_optimizer_has_fewer_owners_of_experts(self) -> None:
        cost = replace(COST, training=replace(COST.training, distributed_optimizer=True))
        moved = bytes_to_move(plan_of(1), replace(plan_of(4), replicas=plan_of(4).replicas[::-1]), cost)
        assert not moved, "who had all experts lacks none"
        fresh = ParallelPlan((*plan_of(2).replicas[:2],
                              *(replace(each, stages=((8 + n,), (10 + n,))) for n, each in
                                enumerate(plan_of(2).replicas[2:]))), expert_parallel=2)  # fmt: skip
        experts = 2 * 4 * 3 * 4096 * 14336
        rest = sum(layer.parameters for layer in EXPERTS.layers[3:]) - 2 * experts
        assert bytes_to_move(plan_of(2), fresh, cost)[10] == pytest.approx(experts * (2 + 12 / 2) + rest * (2 + 12 / 4))

    def test_experts_in_unequal_numbers_are_those_that_a_worker_has_and_lacks(self) -> None:
        """Of four that have two of eight experts each, three are to have 3, 3 and 2."""
        three = tuple(replace(each, stages=(each.stages[0],), chunks=WHOLE) for each in plan_of(1).replicas[:3])
        pairs = tuple(replace(each, stages=(each.stages[0],), chunks=WHOLE) for each in plan_of(1).replicas)
        one = 4 * 3 * 4096 * 14336 * 14  # an expert of each layer
        moved = bytes_to_move(
            ParallelPlan(pairs, expert_parallel=4), ParallelPlan(three, expert_parallel=3, uneven_experts=8), COST
        )
        assert {worker: each / one for worker, each in moved.items()} == pytest.approx({0: 1, 1: 2, 2: 2})

    def test_members_of_a_stage_with_other_experts_each_keep_them(self) -> None:
        """Two replicas of two members, of which each has a cut of half of the experts, or all of a quarter."""
        rows = tuple(Replica(((2 * r, 2 * r + 1),), (2 * r, 2 * r + 1), WHOLE) for r in range(2))
        cut, whole = ParallelPlan(rows, expert_parallel=2), ParallelPlan(rows, expert_parallel=2, expert_members=1)
        one = 4 * 3 * 4096 * 14336 * 14
        assert not bytes_to_move(whole, whole, COST)
        assert [each / one for each in bytes_to_move(cut, whole, COST).values()] == pytest.approx([1] * 4)

    def test_one_death_loses_a_share_of_the_experts_that_lives_once(self) -> None:
        left = Health({worker: 1.0 for worker in range(8) if worker != 5})
        require_state(plan_of(2), left, COST.training, node_of)
        with pytest.raises(NoPlanError, match="layer 3, share 1 of 4 of its experts"):
            require_state(plan_of(4), left, COST.training, node_of)

    def test_a_copy_of_the_optimizers_part_keeps_experts_that_live_once(self) -> None:
        """On another node. So a node may die, and two workers of different nodes may lose a part."""
        training = replace(COST.training, distributed_optimizer=True)
        require_state(
            plan_of(4), Health({worker: 1.0 for worker in range(8) if worker not in (6, 7)}), training, node_of
        )
        with pytest.raises(
            NoPlanError, match="a part of the optimizer's state of stage 1 TP rank 0 died with its copy"
        ):
            require_state(
                plan_of(4), Health({worker: 1.0 for worker in range(8) if worker not in (5, 6)}), training, node_of
            )

    def test_a_standby_keeps_the_copy_of_the_last_part(self) -> None:
        """Planners say what it holds layer by layer."""
        training = replace(COST.training, distributed_optimizer=True)
        replicas = tuple(Replica(((r,),), (2 * r, 2 * r + 1), WHOLE) for r in range(2))
        plan = ParallelPlan(replicas, standbys={2: (Shard(0, WHOLE[-1].end, 0, 1),)})
        require_state(plan, Health({0: 1.0, 2: 1.0}), training, node_of)
        with pytest.raises(NoPlanError, match="died with its copy"):
            require_state(plan, Health({0: 1.0}), training, node_of)

    def test_replicas_of_other_stages_have_no_parts_in_common(self) -> None:
        """Parameters are all that is asked of them."""
        training = replace(COST.training, distributed_optimizer=True)
        unlike = ParallelPlan((Replica(((0,), (1,)), (0, 1, 2, 3), CHUNKS), Replica(((2,),), (4, 5, 6, 7), WHOLE)))
        require_state(unlike, Health({2: 1.0}), training, node_of)
        with pytest.raises(NoPlanError, match="the state of layer 3 is not held"):
            require_state(unlike, Health({0: 1.0}), training, node_of)
