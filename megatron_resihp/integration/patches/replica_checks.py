# SPDX-License-Identifier: Apache-2.0
"""Patches: where Megatron itself compares replicas (`--check-weight-hash-across-dp-replicas-interval`, `--test-mode`).

It asks in its data-parallel groups, which say nothing under a heterogeneous plan, and for each micro-batch, of which
replicas may run unequal numbers. Replaces check_param_hashes_across_dp_replicas and Attention.run_realtime_tests. May
import megatron and this package.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.plan import data_parallel_of


def wrap_check_param_hashes(runtime: Runtime, original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def check_param_hashes_across_dp_replicas(model: Any, cross_check: bool = False) -> bool:
        return runtime.mode.replicas_agree(functools.partial(original, model, cross_check))

    return check_param_hashes_across_dp_replicas


def wrap_run_realtime_tests(runtime: Runtime, original: Callable[..., None]) -> Callable[..., None]:
    """Each replica asks all others once for each micro-batch: one that has more would wait for ever."""

    @functools.wraps(original)
    def run_realtime_tests(self: Any) -> None:
        args, plan = runtime.job.args, runtime.view.plan
        evaluated = args.eval_global_batch_size // args.eval_micro_batch_size
        if len({len(each.micro_batches) for each in plan.replicas}) == 1 and evaluated % data_parallel_of(plan) == 0:
            original(self)

    return run_realtime_tests
