# SPDX-License-Identifier: Apache-2.0
"""Hooks for fault injection in Megatron's forward, backward, P2P and gradient sync, installed only where needed.

Where experts' communication is overlapped, Megatron takes both passes apart into nodes and calls neither step.
Under a heterogeneous plan `ops.measured_exchange` and `modes.heterogeneous` have P2P's and gradient sync's hooks of
their own. May import megatron and this package.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_resihp.integration.patch import Patch
from megatron_resihp.integration.runtime import Runtime

TARGETS = {
    "forward": (
        "megatron.core.pipeline_parallel.schedules:forward_step",
        "megatron.core.pipeline_parallel.utils:ScheduleNode.forward",
    ),
    "backward": (
        "megatron.core.pipeline_parallel.schedules:backward_step",
        "megatron.core.pipeline_parallel.utils:ScheduleNode.backward",
    ),
    "p2p": ("megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",),
    "grad-sync": ("megatron.training.training:finalize_model_grads",),
}


def injection_patches(runtime: Runtime) -> list[Patch]:
    """Patches that report reaching the points that this worker's fault injections wait for."""
    return [
        Patch(target, functools.partial(_reaching, runtime, point), None, f"lets fault injections strike at {point}")
        for point, targets in TARGETS.items()
        if point in runtime.scheduled.injections.points()
        for target in targets
    ]


def _reaching(runtime: Runtime, point: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reached(*positional: Any, **options: Any) -> Any:
        runtime.reach(point)
        return original(*positional, **options)

    return reached
