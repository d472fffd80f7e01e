# SPDX-License-Identifier: Apache-2.0
"""Hooks for fault injection inside forward, backward, P2P and gradient sync, installed only where they are needed.

P2P and gradient sync are Megatron's own or, under a heterogeneous plan, this project's. May import
megatron and this package.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_resihp.integration.patch import Patch
from megatron_resihp.integration.runtime import Runtime

EXCHANGE = "megatron_resihp.executor.exchange:GlooExchange"
TARGETS = {
    "forward": ("megatron.core.pipeline_parallel.schedules:forward_step",),
    "backward": ("megatron.core.pipeline_parallel.schedules:backward_step",),
    "p2p": (
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
        f"{EXCHANGE}.send", f"{EXCHANGE}.receive",
    ),
    "grad-sync": ("megatron.training.training:finalize_model_grads",),
}  # fmt: skip


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
