# SPDX-License-Identifier: Apache-2.0
"""Hooks for fault injection in Megatron's forward, backward, P2P and gradient sync, and where those that share experts
or sequences meet; installed only where needed.

Where experts' communication is overlapped, Megatron takes both passes apart into nodes and calls neither step.
Under a heterogeneous plan `ops.measured_exchange` and `modes.heterogeneous` have P2P's and gradient sync's hooks of
their own. Of sequences only the CPU stand-in's attention has hooks. May import megatron and this package.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

from megatron_resihp.integration.patch import Patch
from megatron_resihp.integration.runtime import Runtime

_DISPATCHERS: Final = "megatron.core.transformer.moe.token_dispatcher"
ALL_TO_ALL: Final = f"{_DISPATCHERS}:MoEAlltoAllTokenDispatcher"
ALL_GATHER: Final = f"{_DISPATCHERS}:MoEAllGatherTokenDispatcher"
SHARED_SEQUENCE: Final = "megatron_resihp.cpu.context_attention:Gathered"

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
    "dispatch": (f"{ALL_TO_ALL}.token_dispatch", f"{ALL_GATHER}.token_dispatch"),
    "combine": (f"{ALL_TO_ALL}.token_combine", f"{ALL_GATHER}.token_combine"),
    "context": (f"{SHARED_SEQUENCE}.forward",),
    "context-backward": (f"{SHARED_SEQUENCE}.backward",),
}
IN_BACKWARD = {"dispatch-backward": TARGETS["dispatch"], "combine-backward": TARGETS["combine"]}
"""Points that are reached when the gradients of what these give come back."""


def injection_patches(runtime: Runtime) -> list[Patch]:
    """Patches that report reaching the points that this worker's fault injections wait for."""
    return [
        Patch(target, functools.partial(hook, runtime, point), None, f"lets fault injections strike at {point}")
        for hook, points in ((_reaching, TARGETS), (_reaching_backward, IN_BACKWARD))
        for point, targets in points.items()
        if point in runtime.scheduled.injections.points()
        for target in targets
    ]


def _reaching(runtime: Runtime, point: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reached(*positional: Any, **options: Any) -> Any:
        runtime.reach(point)
        return original(*positional, **options)

    return reached


def _reaching_backward(runtime: Runtime, point: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def called(*positional: Any, **options: Any) -> Any:
        given = original(*positional, **options)
        tokens = given[0] if isinstance(given, tuple) else given
        if tokens.requires_grad:
            tokens.register_hook(lambda gradient: runtime.reach(point))
        return given

    return called
