"""The programs of known schedules: 1F1B and interleaved 1F1B as Megatron runs them, and zero-bubble ZB-H1.

Imports nothing beyond `pipeline`. The orders of the first two are those of megatron-core 0.19,
`megatron.core.pipeline_parallel.schedules`, to the op; a test runs Megatron's own functions beside them.
"""

from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.pipeline.program import Program, ProgramError

F, B, W = OpKind

Orders = tuple[tuple[Op, ...], ...]
"""The ops of each device, in the order in which it runs them."""


def one_f_one_b(stages: int, micro_batches: int) -> Program:
    """1F1B without interleaving: `forward_backward_pipelining_without_interleaving`.

    Raises:
        ProgramError: there is no stage or no micro-batch.
    """
    return Program(one_f_one_b_orders(stages, micro_batches), tuple(range(stages)), micro_batches)


def one_f_one_b_orders(stages: int, micro_batches: int) -> Orders:
    """Its ops, of each device."""
    return tuple(tuple(_one_f_one_b_ops(stages, stage, micro_batches)) for stage in range(stages))


def _one_f_one_b_ops(stages: int, stage: int, micro_batches: int) -> list[Op]:
    forwards = [Op(F, stage, micro_batch) for micro_batch in range(micro_batches)]
    backwards = [Op(B, stage, micro_batch) for micro_batch in range(micro_batches)]
    return _one_by_one(forwards, backwards, warm_up=stages - stage - 1)


def _one_by_one(forwards: list[Op], backwards: list[Op], warm_up: int) -> list[Op]:
    """At most `warm_up` forwards, then a forward before each backward while there are any."""
    ops = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        ops += (forward, backward)
    return ops + backwards[len(forwards[warm_up:]) :]


def interleaved(devices: int, chunks: int, micro_batches: int, group_size: int | None = None) -> Program:
    """Interleaved 1F1B: `forward_backward_pipelining_with_interleaving`; chunk c of device d is stage c · devices + d.

    Megatron refuses fewer micro-batches than devices; here they are one group. Megatron's
    `overlap_moe_expert_parallel_comm`, which takes one more forward into the warm-up, is not covered.

    Args:
        devices: pipeline-parallel size.
        chunks: model chunks of each device; one chunk is 1F1B without interleaving, as in Megatron.
        micro_batches: how many micro-batches are run.
        group_size: Megatron's `microbatch_group_size_per_vp_stage`: how many micro-batches a device runs through one
            chunk before it turns to the next one. By default the smallest that works: `devices`, if it divides
            `micro_batches`.

    Raises:
        ProgramError: a size is below 1, or a group, the last one included, is smaller than `devices`: then devices may
            wait for each other in a circle. Megatron refuses the same.
    """
    orders = interleaved_orders(devices, chunks, micro_batches, group_size)
    return Program(orders, tuple(stage % devices for stage in range(devices * chunks)), micro_batches)


def interleaved_orders(devices: int, chunks: int, micro_batches: int, group_size: int | None = None) -> Orders:
    """Its ops, of each device; arguments and errors as of `interleaved`."""
    if min(devices, chunks, micro_batches, 1 if group_size is None else group_size) < 1:
        sizes = f"{devices} devices, {chunks} chunks and {micro_batches} micro-batches in groups of {group_size}"
        raise ProgramError(f"no pipeline has {sizes}")
    if chunks == 1:
        return one_f_one_b_orders(devices, micro_batches)
    group = _group_size(devices, micro_batches) if group_size is None else min(group_size, micro_batches)
    smallest = micro_batches % group or group
    if smallest < min(devices, micro_batches):
        raise ProgramError(f"a group of {smallest} micro-batches is smaller than the {devices} devices")
    turns = [
        (chunk, micro_batch)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]

    def ops(device: int) -> list[Op]:
        forwards = [Op(F, chunk * devices + device, m) for chunk, m in turns]
        backwards = [Op(B, (chunks - 1 - chunk) * devices + device, m) for chunk, m in turns]
        return _one_by_one(forwards, backwards, warm_up=2 * (devices - device - 1) + (chunks - 1) * group)

    return tuple(tuple(ops(device)) for device in range(devices))


def _group_size(devices: int, micro_batches: int) -> int:
    """The smallest group of at least `devices` micro-batches that leaves no smaller one over."""
    sizes = range(devices, micro_batches)
    return next((size for size in sizes if micro_batches % size == 0 or micro_batches % size >= devices), micro_batches)


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


def zero_bubble_h1_orders(stages: int, micro_batches: int) -> Orders:
    """Its ops, of each device."""

    def ops(stage: int) -> list[Op]:
        ordered: list[Op] = []
        for op in _one_f_one_b_ops(stages, stage, micro_batches):
            ordered.append(op)
            if op.kind is B and op.micro_batch >= stage:
                ordered.append(Op(W, stage, op.micro_batch - stage))
        held_back = range(max(micro_batches - stage, 0), micro_batches)
        return ordered + [Op(W, stage, micro_batch) for micro_batch in held_back]

    return tuple(tuple(ops(stage)) for stage in range(stages))
