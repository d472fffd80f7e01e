# SPDX-License-Identifier: Apache-2.0
"""Patch: the schedule. Gives each replica its own share of the micro-batches and weighs every sample the same.

Replaces megatron.training.training.get_forward_backward_func. Megatron divides each loss by the replica's own count and
averages over replicas; with unlike counts that would weigh samples by their replica (DESIGN contract 2).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from megatron_resihp.integration.patches import prediction_metrics
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.expert_biases import begin_counting
from megatron_resihp.integration.step.attention_logits import forget_logits

Schedule = Callable[..., list[dict[str, Any]]]
NOTHING_REPORTED: Final[list[dict[str, Any]]] = [{}]
"""Of a worker without the head. Megatron 0.18 asks its groups who has the head, which know no stages under a
heterogeneous plan, and looks into the first report."""


def wrap_get_forward_backward_func(runtime: Runtime, original: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """The replacement of get_forward_backward_func."""

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Schedule:
        return functools.partial(_run, runtime, original(*args, **kwargs))

    return get_forward_backward_func


@contextmanager
def _micro_batches_of_evaluations(args: Any) -> Iterator[None]:
    """Megatron's script makes room for batches that come from another member by the size of those of training."""
    usual, args.micro_batch_size = args.micro_batch_size, args.eval_micro_batch_size
    try:
        yield
    finally:
        args.micro_batch_size = usual


def _run(runtime: Runtime, schedule: Schedule, **kwargs: Any) -> list[dict[str, Any]]:
    if kwargs.get("forward_only"):
        runtime.reach("evaluate")
        with _micro_batches_of_evaluations(runtime.job.args):
            return runtime.mode.evaluate(schedule, kwargs) or NOTHING_REPORTED
    begin_counting(runtime.held.live.model)
    runtime.loads.begin(runtime.held.live.model, runtime.progress.iteration)
    forget_logits(runtime)
    # Also where Megatron runs an iteration again to explain a result.
    prediction_metrics.forget()
    runtime.probes.begin_schedule()
    runtime.progress.losses = runtime.mode.train(schedule, kwargs)
    return runtime.progress.losses or NOTHING_REPORTED
