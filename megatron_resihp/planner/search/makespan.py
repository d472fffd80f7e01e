# SPDX-License-Identifier: Apache-2.0
"""Computes how long 1F1B and ZB-H1 take on stages of unequal speed, without a program. Imports numpy and numba."""

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.pipeline.times import Array


@compiled
def pipeline_makespan(
    forward: Array,
    backward: Array,
    weight: Array,
    transfer: Array,
    stages: int,
    micro_batches: int,
    free: Array,
    done: Array,
) -> float:
    """Seconds from the first F to the last op; equals what `simulate` gives for `zero_bubble_h1`.

    If W takes no time, the result is that of `one_f_one_b`. Stage s runs S − 1 − s forwards ahead, and runs W of a
    micro-batch s micro-batches after its B. The waves follow the order of dependence. In wave j, every stage first runs
    F of micro-batch j + S − 1 − s, which needs the F of the stage before from the wave before. Then, last stage first,
    it runs B of micro-batch j and W of micro-batch j − s.

    Args:
        forward, backward, weight: seconds of each stage's op, [≥ stages].
        transfer: seconds from each stage to the next and back, [≥ stages].
        stages, micro_batches: how many there are.
        free, done: scratch, [≥ stages].
    """
    free[:stages] = 0.0
    done[:stages] = 0.0
    for wave in range(1 - stages, micro_batches):
        for stage in range(stages - 1, -1, -1):
            if 0 <= wave + stages - 1 - stage < micro_batches:
                start = free[stage]
                if stage > 0:
                    start = max(start, done[stage - 1] + transfer[stage - 1])
                done[stage] = start + forward[stage]
                free[stage] = done[stage]
        if wave >= 0:
            arrival = 0.0
            for stage in range(stages - 1, -1, -1):
                end = max(free[stage], arrival) + backward[stage]
                arrival = end + transfer[stage - 1]
                free[stage] = end + weight[stage] if wave >= stage else end
    makespan = 0.0
    for stage in range(stages):
        makespan = max(makespan, free[stage] + min(stage, micro_batches) * weight[stage])
    return makespan
