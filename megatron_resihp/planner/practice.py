# SPDX-License-Identifier: Apache-2.0
"""Plans small jobs with slow or dead workers, so that Numba compiles every loop of the planners.

`python -m megatron_resihp.planner.practice` does this for an installation; later processes only load the machine code.
Imports `plan`, `cost`, `pipeline` and `planner`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import ParallelPlan, even_chunks, spelled_out
from megatron_resihp.planner import JobShape, NoPlanError, initial_plan
from megatron_resihp.planner.evaluation import evaluate, iteration_times
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.moves import seconds_to_get_there
from megatron_resihp.planner.strategies.joint import Settings, joint
from megatron_resihp.planner.strategies.registry import STRATEGIES
from megatron_resihp.planner.strategy import Strategy

WORKERS: Final = 8
LAYERS: Final = 8
SHAPES: Final = (JobShape(2, 2, 8, WORKERS), JobShape(1, 4, 8, WORKERS))
"""Numba compiles a function for each kind of array; pipelines of two stages use different kinds from longer ones."""


def practise() -> None:
    """Run every strategy and evaluate its plans."""
    for shape in SHAPES:
        cost, plan = _job(shape)
        well = dict.fromkeys(plan.members, 1.0)
        slow = Health({**well, 1: 0.7}, {(0, 4): 0.5})
        dead = Health({worker: speed for worker, speed in well.items() if worker != 3})
        for health in (slow, dead):
            for strategy in _strategies():
                with suppress(NoPlanError):
                    _judge(plan, strategy(plan, health, cost), health, cost)


def _job(shape: JobShape) -> tuple[JobCost, ParallelPlan]:
    """A job in its first plan, on devices with memory for anything."""
    arguments = {
        "num_layers": LAYERS, "hidden_size": 768, "num_attention_heads": 12, "padded_vocab_size": 1024,
        "max_position_embeddings": 256,
    }  # fmt: skip
    model, device = model_from_arguments(arguments), Device(312e12, latency=1e-5, bandwidth=25e9)
    cost = JobCost(model, Training(256), device, shape.micro_batches, shape.workers_per_node)
    return cost, spelled_out(initial_plan(shape, WORKERS), even_chunks(LAYERS, shape.pipeline_parallel))


def _strategies() -> Iterator[Strategy]:
    yield from (entry.strategy for name, entry in STRATEGIES.items() if name != "joint")
    for uneven in (False, True):
        yield partial(joint, settings=Settings(uneven=uneven))


def _judge(before: ParallelPlan, after: ParallelPlan, health: Health, cost: JobCost) -> None:
    """Evaluate a typical iteration, as jobs do, and several iterations, as simulations do."""
    evaluate(after, health, cost)
    iteration_times(after, health, cost, np.full((2, cost.micro_batches), cost.typical_squares))
    seconds_to_get_there(before, after, cost)


if __name__ == "__main__":
    practise()
