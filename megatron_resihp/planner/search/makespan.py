"""How long 1F1B takes over stages of unlike speed, without building the program. Imports numpy and numba."""

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.pipeline.times import Array


@compiled
def one_f_one_b_makespan(
    forward: Array, backward: Array, transfer: Array, stages: int, micro_batches: int, free: Array, done: Array
) -> float:
    """Seconds from the first F to the last B; what `simulate` gives for `one_f_one_b`, in order of dependence.

    Stage s runs S − 1 − s forwards ahead. In wave j every stage runs F of micro-batch j + S − 1 − s, which needs the F
    that the stage before ran in the wave before, and then, last stage first, B of micro-batch j.

    Args:
        forward, backward: seconds of each stage's op, [≥ stages].
        transfer: seconds from each stage to the next and back, [≥ stages − 1].
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
                free[stage] = max(free[stage], arrival) + backward[stage]
                arrival = free[stage] + transfer[stage - 1]
    return free[:stages].max()
