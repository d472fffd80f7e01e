# SPDX-License-Identifier: Apache-2.0
"""What a broken epoch leaves of a schedule that overlaps experts' communication (--overlap-moe-expert-parallel-comm).

May import torch and megatron.
"""

import gc

import torch
from megatron.core.pipeline_parallel.utils import get_comm_stream


def leave_overlap() -> None:
    """Let all later work come after what is still queued for communication, and free what the schedule has held.

    The schedule has a stream of its own for communication, and gives back memory as soon as what uses it is queued.
    Its nodes refer to themselves until their backward pass has been run, and hold activations. Groups have been
    aborted, so nothing on the stream waits for others any more.
    """
    stream = get_comm_stream()
    if stream is None:  # no such schedule has been run
        return
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()
