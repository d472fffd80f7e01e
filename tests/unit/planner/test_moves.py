# SPDX-License-Identifier: Apache-2.0
"""Bytes to move between two plans, and what getting there takes."""

from dataclasses import replace

import pytest

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import Chunk, OwnSplit, ParallelPlan, Replica, Shard
from megatron_resihp.planner.moves import bytes_to_move, seconds_to_get_there

MODEL = model_from_arguments({**PRESETS["llama2-7b"], "num_layers": 6})
COST = JobCost(MODEL, Training(4096), Device(312e12, bandwidth=25e9), micro_batches=4, rebuild_s=2.0)
LAYER = MODEL.layers[1].parameters * 14
HEAD = MODEL.layers[-1].parameters * 14


def pipeline(*stages: tuple[int, ...], ends: tuple[int, ...]) -> ParallelPlan:
    chunks = tuple(Chunk(number, *pair) for number, pair in enumerate(zip((0, *ends), ends, strict=False)))
    return ParallelPlan((Replica(stages, (0, 1, 2, 3), chunks),))


BEFORE = pipeline((0, 1), (2, 3), ends=(4, 8))


def test_nothing_moves_where_nothing_changes() -> None:
    assert bytes_to_move(BEFORE, BEFORE, COST) == {}
    assert seconds_to_get_there(BEFORE, BEFORE, COST) == 0


def test_a_layer_that_changes_stages_moves_to_each_member_by_half() -> None:
    after = pipeline((0, 1), (2, 3), ends=(5, 8))
    assert bytes_to_move(BEFORE, after, COST) == pytest.approx({0: LAYER / 2, 1: LAYER / 2})
    assert seconds_to_get_there(BEFORE, after, COST) == pytest.approx(2 + LAYER / 2 / 25e9)


def test_a_wider_slice_of_the_same_layers_moves_only_what_is_missing() -> None:
    after = pipeline((0, 1), (2,), ends=(4, 8))
    assert bytes_to_move(BEFORE, after, COST) == pytest.approx({2: (3 * LAYER + HEAD) / 2})


def test_who_holds_nothing_or_another_slice_gets_all_of_it() -> None:
    after = pipeline((1, 0), (2, 9), ends=(4, 8))
    moved = bytes_to_move(BEFORE, after, COST)
    assert moved.keys() == {0, 1, 9}
    assert moved[9] == pytest.approx((3 * LAYER + HEAD) / 2)


def test_state_may_move_more_slowly_than_results() -> None:
    """It always goes through host memory."""
    after, slow = pipeline((0, 1), (2, 3), ends=(5, 8)), replace(COST, state_bandwidth=2e9)
    assert seconds_to_get_there(BEFORE, after, slow) == pytest.approx(2 + LAYER / 2 / 2e9)


class TestDistributedOptimizer:
    """Of four replicas of two stages, which only the job's own layout can share out."""

    own = (Chunk(0, 0, 4), Chunk(1, 4, 8))
    cost = replace(COST, training=replace(COST.training, distributed_optimizer=True, shared_by=OwnSplit(own, 1)))

    def plan(self, end: int) -> ParallelPlan:
        """The first replica's first stage has the layers before `end`."""
        first = (Chunk(0, 0, end), Chunk(1, end, 8))
        return ParallelPlan(tuple(
            Replica(((2 * number,), (2 * number + 1,)), (number,), self.own if number else first) for number in range(4)
        ))  # fmt: skip

    def test_all_get_the_rest_of_it_for_what_they_hold_where_the_next_plan_shares_none(self) -> None:
        moved = bytes_to_move(self.plan(4), self.plan(5), self.cost)
        parameters = [sum(layer.parameters for layer in MODEL.layers[chunk.first : chunk.end]) for chunk in self.own]
        rest = [12 * count * 3 / 4 for count in parameters]
        assert moved == pytest.approx({worker: rest[worker % 2] + (LAYER if worker == 0 else 0) for worker in range(8)})

    def test_what_a_worker_lacks_is_whole_between_such_plans_and_on_the_way_out_of_them(self) -> None:
        assert bytes_to_move(self.plan(5), self.plan(6), self.cost) == pytest.approx({0: LAYER})
        assert bytes_to_move(self.plan(3), self.plan(2), self.cost) == pytest.approx({1: LAYER})

    def test_a_share_moves_between_plans_that_share_it(self) -> None:
        before = self.plan(4)
        after = replace(before, replicas=(*before.replicas[:3], Replica(((6,), (8,)), (3,), self.own)))
        parameters = sum(layer.parameters for layer in MODEL.layers[4:])
        assert bytes_to_move(before, after, self.cost) == pytest.approx({8: parameters * (2 + 12 / 4)})


def test_a_standby_has_what_it_kept() -> None:
    keeps = ParallelPlan(BEFORE.replicas, {9: (Shard(4, 8, 1, 2),)})
    after = pipeline((0, 1), (2, 9), ends=(4, 8))
    assert bytes_to_move(keeps, after, COST) == {}
