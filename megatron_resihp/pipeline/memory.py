# SPDX-License-Identifier: Apache-2.0
"""How many activations a program keeps alive. Imports numpy.

A device runs its ops one after another, so the live activations depend on their order and not on their durations.
"""

import numpy as np
from numpy.typing import ArrayLike

from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.program import Program
from megatron_resihp.pipeline.times import Array


def peak_live_activations(program: Program, size: ArrayLike = 1.0, kept_until_w: ArrayLike = 1.0) -> Array:
    """The most activations that each device holds at any time, [devices].

    F allocates a stage's activations of one micro-batch. If the program does not split the backward, B frees them. If
    it does, B frees the share that only the input gradient needs, and W frees the rest.

    Args:
        program: what is run.
        size: of the activations of one stage for one micro-batch (such as bytes), broadcastable to [stages,
            micro-batches]. With the default of 1, the result counts pairs of stage and micro-batch.
        kept_until_w: the share of `size`, 0 to 1, that is kept from B to W, the same shape; with 1, W frees everything,
            with 0, B does.

    Raises:
        ValueError: a size is negative or not finite, or a share is outside 0 to 1.
    """
    shape = (program.stages, program.micro_batches)
    sizes, kept = checked_sizes(shape, size, kept_until_w)
    if not program.splits_backward:
        kept = np.zeros(shape)
    change = np.zeros((len(OpKind), *shape))
    change[OpKind.F], change[OpKind.B], change[OpKind.W] = sizes, -sizes * (1 - kept), -sizes * kept
    live = change[tuple(program.flat.T)]
    pairs = zip(program.offsets, program.offsets[1:], strict=False)
    return np.array([live[first:last].cumsum().max(initial=0.0) for first, last in pairs])


def checked_sizes(shape: tuple[int, int], size: ArrayLike, kept_until_w: ArrayLike) -> tuple[Array, Array]:
    """Size and kept share, both as [stages, micro-batches].

    Raises:
        ValueError: a size is negative or not finite, or a share is outside 0 to 1.
    """
    sizes = np.broadcast_to(np.asarray(size, np.float64), shape)
    kept = np.broadcast_to(np.asarray(kept_until_w, np.float64), shape)
    if not (np.all((sizes >= 0) & (sizes < np.inf)) and np.all((kept >= 0) & (kept <= 1))):
        raise ValueError("sizes must be finite and not negative, and shares kept until W between 0 and 1")
    return np.array(sizes), np.array(kept)
