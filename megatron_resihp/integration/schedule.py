"""Seam: the schedule. Gives each replica its own share of the micro-batches and weighs every sample the same.

Replaces megatron.training.training.get_forward_backward_func. Megatron divides each loss by the replica's own count and
averages over replicas; with unlike counts that would weigh samples by their replica (DESIGN contract 2).
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.plan import deal, even_counts

Schedule = Callable[..., list[dict[str, Any]]]


def wrap_get_forward_backward_func(runtime: Runtime, original: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """The replacement of get_forward_backward_func."""

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Schedule:
        return functools.partial(_run, runtime, original(*args, **kwargs))

    return get_forward_backward_func


def _run(runtime: Runtime, schedule: Schedule, **kwargs: Any) -> list[dict[str, Any]]:
    total = kwargs["num_microbatches"]
    replicas = len(runtime.current_plan.replicas)
    if kwargs.get("forward_only"):
        share = deal(even_counts(total, replicas))[runtime.replica]
        runtime.reach("evaluate")
        return schedule(**{**kwargs, "num_microbatches": len(share)})
    runtime.probes.begin_schedule()
    share = runtime.micro_batches
    factor = len(share) * replicas / total
    if factor != 1.0 and not runtime.args.calculate_per_token_loss:
        kwargs["forward_step_func"] = _scaled(kwargs["forward_step_func"], factor)
    runtime.losses = schedule(**{**kwargs, "num_microbatches": len(share)})
    return runtime.losses


def _scaled(forward_step_func: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """The user's forward step with its loss, and nothing that is reported, multiplied by `factor`."""

    @functools.wraps(forward_step_func)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        output, loss_func = forward_step_func(*args, **kwargs)

        def scaled_loss_func(*loss_args: Any, **loss_kwargs: Any) -> Any:
            result = loss_func(*loss_args, **loss_kwargs)
            return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result

        return output, scaled_loss_func

    return forward_step
