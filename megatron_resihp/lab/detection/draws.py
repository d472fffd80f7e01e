# SPDX-License-Identifier: Apache-2.0
"""Jobs of the benchmark by seed: some for tuning detectors, others for scoring them. Imports numpy.

The two sets share no job, as the purpose of a job is part of its seed.
"""

from enum import IntEnum

import numpy as np

from megatron_resihp.lab.detection.faults import SLOWDOWNS, draw_faults
from megatron_resihp.lab.detection.jobs import JobSpec, Schedule, SyntheticJob, make_job, make_layout
from megatron_resihp.lab.detection.noise import NOISES, Noise
from megatron_resihp.lab.detection.shapes import SHAPES, Shape

SEQUENCES = (8192, 16384, 32768)
MICRO_BATCHES = {16: (4, 8), 64: (8, 16), 256: (16, 16)}
"""Micro-batches by number of workers. A pipeline needs about as many micro-batches as stages."""


class Purpose(IntEnum):
    """The purpose of drawn jobs."""

    TUNING = 0
    SCORING = 1


def draw_job(purpose: Purpose, seed: int, noise: Noise, shape: Shape, index: int, timed_every: int = 4) -> SyntheticJob:
    """Job number `index` of a row of the benchmark, which is a kind of noise and a cluster size.

    Even numbers are healthy, odd ones faulty; sequence length, schedule, micro-batches and slowdown vary in turn.
    """
    key = (int(purpose), NOISES.index(noise), SHAPES.index(shape), index)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
    turn, faulty = divmod(index, 2)
    spec = JobSpec(
        shape=shape,
        sequence=SEQUENCES[turn % 3],
        micro_batches=MICRO_BATCHES[shape.workers][turn // 6 % 2],
        schedule=tuple(Schedule)[turn // 3 % 2],
        noise=noise,
        timed_every=timed_every,
    )
    slowdown = SLOWDOWNS[turn % len(SLOWDOWNS)]
    faults = draw_faults(make_layout(shape), slowdown, spec.iterations, rng) if faulty else ()
    return make_job(spec, faults, rng)
