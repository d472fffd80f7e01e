# SPDX-License-Identifier: Apache-2.0
"""Profiles with --profile. They are of one epoch: Megatron's profilers live in its loop, which a recovery leaves.

May import torch and megatron.
"""

import sys
from typing import Any

import torch

from megatron_resihp import cpu


def end_profiling(args: Any, tells: bool) -> None:
    """Stop a profiler that the broken epoch has left running, and start no other.

    Args:
        tells: whether this worker says so.
    """
    if not args.profile:
        return
    args.profile = False
    if torch.autograd._profiler_enabled():
        torch.autograd._disable_profiler()
    if not (args.use_pytorch_profiler or cpu.installed()):
        torch.cuda.cudart().cudaProfilerStop()
    if tells:
        print("resihp: the ranks have changed, so --profile is over", file=sys.stderr, flush=True)
