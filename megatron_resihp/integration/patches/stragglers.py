# SPDX-License-Identifier: Apache-2.0
"""Patch: Megatron's own search for stragglers (--log-straggler), which logs the fastest and the slowest ranks.

Its detector is one object, which is set up once for the ranks of the start. Here it is set up again as train() is
entered again. Replaces StragglerDetector.report. May import megatron and this package.
"""

import functools
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megatron.core.utils import StragglerDetector
from megatron.training import training

from megatron_resihp.integration.runtime import Runtime


def forget_ranks() -> None:
    """An epoch is over: drop what was begun to be measured in it, and let another rank take commands."""
    detector = training.stimer
    if not StragglerDetector._configured:
        return
    StragglerDetector._configured = False
    detector.start = detector.stop = detector.null_method
    detector._off = True
    commands, detector.sock = detector.sock, None
    if commands is not None:
        with suppress(OSError):
            commands.shutdown(socket.SHUT_RDWR)  # its thread waits for a connection
        commands.close()


def wrap_report(runtime: Runtime, original: Callable[..., bool]) -> Callable[..., bool]:
    """Megatron divides by the time that each worker has measured, on all of them together."""

    @functools.wraps(original)
    def report(self: Any, total_flops: float = 0.0, log_interval: int = 0) -> bool:
        if runtime.saves.repeated == runtime.progress.iteration:
            total_flops = 0.0  # of a step that is logged again nothing is measured: then nothing is logged of it
        elif not self.start_gemm_ev:
            # A worker whose micro-batches others run.
            self.start()
            self.stop()
        return original(self, total_flops, log_interval)

    return report
