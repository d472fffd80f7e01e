# SPDX-License-Identifier: Apache-2.0
"""What a broken epoch leaves on streams of their own, where Megatron overlaps experts' communication with computation
(--overlap-moe-expert-parallel-comm, --moe-shared-expert-overlap).

May import torch and megatron.
"""

import gc

import torch
from megatron.core.pipeline_parallel.utils import get_comm_stream
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP


def leave_overlap() -> None:
    """Let all later work come after what is still queued on these streams, and free what schedules have held.

    Communication gives back memory as soon as what uses it is queued, and shared experts add to gradients that are
    freed next. Nodes of the schedule that has a stream for communication refer to themselves until their backward pass
    has been run, and hold activations. Groups have been aborted, so nothing on a stream waits for others any more.
    """
    for stream in (get_comm_stream(), SharedExpertMLP.stream):
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
    if get_comm_stream() is not None:
        gc.collect()
