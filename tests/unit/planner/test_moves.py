# SPDX-License-Identifier: Apache-2.0
"""Bytes to move between two plans, and what getting there takes."""

import pytest

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.layers import model_from_arguments
from megatron_resihp.cost.presets import PRESETS
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Shard
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


def test_a_standby_has_what_it_kept() -> None:
    keeps = ParallelPlan(BEFORE.replicas, {9: (Shard(4, 8, 1, 2),)})
    after = pipeline((0, 1), (2, 9), ends=(4, 8))
    assert bytes_to_move(keeps, after, COST) == {}
