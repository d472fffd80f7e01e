"""Seam: the schedule. Gives each replica its own share of the micro-batches and weighs every sample the same.

Replaces megatron.training.training.get_forward_backward_func. Megatron divides each loss by the replica's own count and
averages over replicas; with unlike counts that would weigh samples by their replica (DESIGN contract 2).
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_resihp.integration.general import General
from megatron_resihp.integration.program_schedule import run_evaluation, run_training
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
    if runtime.general is not None:
        return _run_general(runtime, runtime.general, kwargs)
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


def _run_general(runtime: Runtime, general: General, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    call = (kwargs["forward_step_func"], kwargs["data_iterator"], kwargs["model"], kwargs["num_microbatches"])
    if kwargs.get("forward_only"):
        runtime.reach("evaluate")
        return run_evaluation(runtime, general, *call)
    runtime.probes.begin_schedule()
    runtime.losses = run_training(runtime, general, *call)
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
