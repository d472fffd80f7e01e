# SPDX-License-Identifier: Apache-2.0
"""What nodes send each other: gradients where replicas are apart, results where stages are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_resihp.cost.crossing import Crossing, crossing
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import Training, training_from_arguments
from megatron_resihp.plan import ParallelPlan, even_chunks, spelled_out
from megatron_resihp.planner import JobShape, initial_plan

ARGUMENTS: dict[str, Any] = {**PRESETS["llama2-7b"], "seq_length": 4096}
MODEL, TRAINING = model_from_arguments(ARGUMENTS), training_from_arguments(ARGUMENTS)
SHAPE = JobShape(2, 2, 32, workers_per_node=8)


def plan_of(pipeline_last: bool, workers: int = 16) -> ParallelPlan:
    """On nodes of eight."""
    return spelled_out(initial_plan(SHAPE, workers, pipeline_last), even_chunks(32, 2))


def sent(pipeline_last: bool, training: Training = TRAINING, workers: int = 16) -> Crossing:
    return crossing(plan_of(pipeline_last, workers), MODEL, training, SHAPE.node_of)


def test_a_stage_on_each_node() -> None:
    """Results of 32 micro-batches cross there, and as many gradients back, in both TP ranks."""
    assert sent(pipeline_last=True) == Crossing(0, 2 * 32 * 4096 * 4096 * 2)


def test_whole_replicas_on_each_node() -> None:
    """A ring of four sums a worker's gradients in six quarters, twice for each of the node's shards."""
    plan = plan_of(pipeline_last=False)
    used = memory_of(plan, MODEL, TRAINING)
    whole = sum(used[worker].gradients for worker in (0, 1, 2, 3))
    assert sent(pipeline_last=False) == Crossing(pytest.approx(whole * 1.5), 0)


def test_members_of_a_stage_that_share_the_sequence_send_a_part_each() -> None:
    halved = sent(pipeline_last=True, training=replace(TRAINING, sequence_parallel=True))
    assert halved.results * 2 == sent(pipeline_last=True).results


def test_a_shared_optimizer_sends_weights_back_and_copies_of_gradients_on() -> None:
    """Two replicas on each node; of four edges of the ring of copies, two cross, one from each node."""
    used = memory_of(plan_of(pipeline_last=False), MODEL, TRAINING)
    gradients = sum(used[worker].gradients for worker in (0, 1, 2, 3))
    weights = sum(used[worker].weights for worker in (0, 1, 2, 3))
    found = sent(pipeline_last=False, training=replace(TRAINING, distributed_optimizer=True))
    assert found.gradients == pytest.approx((gradients + weights) * 0.75 + gradients * 0.25)


def test_one_node_sends_nothing() -> None:
    assert sent(pipeline_last=True, workers=8) == Crossing(0, 0)


def test_the_busiest_node_counts() -> None:
    """Of three stages on nodes of their own, the middle one passes on both ways."""
    shape = JobShape(8, 3, 6, workers_per_node=8)
    plan = spelled_out(initial_plan(shape, 24), even_chunks(33, 3))
    deeper = model_from_arguments({**ARGUMENTS, "num_layers": 33})
    assert crossing(plan, deeper, TRAINING, shape.node_of) == Crossing(0, 2 * 8 * 6 * 4096 * 4096 * 2)
