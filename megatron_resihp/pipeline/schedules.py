# SPDX-License-Identifier: Apache-2.0
"""The programs of known schedules: 1F1B and interleaved 1F1B as Megatron runs them, and zero-bubble ZB-H1.

Imports nothing beyond `pipeline`. The orders of the first two are exactly those of megatron-core 0.19,
`megatron.core.pipeline_parallel.schedules`; a test runs Megatron's own functions for comparison.
"""

from megatron_resihp.pipeline.orders import interleaved_orders, one_f_one_b_orders, zero_bubble_h1_orders
from megatron_resihp.pipeline.program import Program


def one_f_one_b(stages: int, micro_batches: int) -> Program:
    """1F1B without interleaving: `forward_backward_pipelining_without_interleaving`.

    Raises:
        ProgramError: there is no stage or no micro-batch.
    """
    return Program(one_f_one_b_orders(stages, micro_batches), tuple(range(stages)), micro_batches)


def interleaved(devices: int, chunks: int, micro_batches: int, group_size: int | None = None) -> Program:
    """Interleaved 1F1B: `forward_backward_pipelining_with_interleaving`; chunk c of device d is stage c · devices + d.

    Megatron refuses fewer micro-batches than devices; here they form one group. Megatron's
    `overlap_moe_expert_parallel_comm`, which takes one more forward into the warm-up, is not covered.

    Args:
        devices: pipeline-parallel size.
        chunks: model chunks of each device; one chunk is 1F1B without interleaving, as in Megatron.
        micro_batches: number of micro-batches.
        group_size: Megatron's `microbatch_group_size_per_vp_stage`: how many micro-batches a device runs through one
            chunk before it turns to the next one. By default the smallest that works: `devices`, if it divides
            `micro_batches`.

    Raises:
        ProgramError: a size is below 1, or a group, the last one included, is smaller than `devices`: then devices may
            wait for each other in a circle. Megatron refuses such sizes too.
    """
    orders = interleaved_orders(devices, chunks, micro_batches, group_size)
    return Program(orders, tuple(stage % devices for stage in range(devices * chunks)), micro_batches)


def zero_bubble_h1(stages: int, micro_batches: int) -> Program:
    """ZB-H1: 1F1B with the backward split, W held back so that it fills what would be bubbles.

    Stage i runs W of a micro-batch when it is i micro-batches behind B. So no stage holds more activations than the
    first stage of 1F1B, even if they are kept until W. With equal stages, no P2P time, T_W ≤ T_F and T_W ≤ T_B, each
    stage idles for (stages − 1) · (T_F + T_B − T_W), instead of (stages − 1) · (T_F + T_B + T_W) with 1F1B.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.1 and table 1.

    Raises:
        ProgramError: there is no stage or no micro-batch.
    """
    orders = zero_bubble_h1_orders(stages, micro_batches)
    return Program(orders, tuple(range(stages)), micro_batches, splits_backward=True)
