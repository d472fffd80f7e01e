# SPDX-License-Identifier: Apache-2.0
"""Patch: Megatron's checks of losses and gradients for NaN. May import this package.

NCCL ends an aborted collective on the device without its result, so what is computed from it until the host hears of
the break may be NaN. Megatron would log that as a fault of the device, or, with `--rerun-mode disabled`, raise.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_resihp.integration.loop.device_loss import comes_of_a_break
from megatron_resihp.integration.runtime import Runtime


def wrap_validate_result(runtime: Runtime, original: Callable[..., None]) -> Callable[..., None]:
    """validate_result that rejects nothing while the epoch is broken: the iteration will be given up anyway."""

    @functools.wraps(original)
    def validate_result(
        machine: Any, result: Any, rejection_func: Callable[[Any], bool], *positional: Any, **options: Any
    ) -> None:
        def rejects(value: Any) -> bool:
            # In this order: the first waits for the device, and the epoch may break meanwhile.
            return rejection_func(value) and not comes_of_a_break(runtime.control, runtime.job.args.distributed_backend)

        original(machine, result, rejects, *positional, **options)

    return validate_result
