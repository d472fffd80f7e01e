# SPDX-License-Identifier: Apache-2.0
"""Micro-benchmarks on suspects between two iterations: matrix products of the training's shape.

They begin after a step. When that step was agreed on, every worker had heard of them, so all suspects measure after the
same one. May import torch, `control`, `detector.input.records` and this package.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_resihp.detector.input.records import SpanKind
from megatron_resihp.events.detection import Validation
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.protocol.notices import MatrixProduct


def validate(runtime: Runtime) -> None:
    """Measure what the order asks of this worker, and tell how long that took. Waits for the device."""
    order = runtime.orders.validation
    assert order is not None
    runtime.orders.validation = None
    gemms = [gemm for gemm in order.gemms if runtime.worker in gemm.workers]
    if not gemms:
        return
    began = time.monotonic()
    with runtime.probes.span(SpanKind.VALIDATION):
        gemm_seconds = [seconds for gemm in gemms for seconds in _time_gemm(runtime, gemm)]
    runtime.control.event(Validation(
        number=order.number, iteration=runtime.progress.iteration, seconds=time.monotonic() - began,
        gemm_seconds=tuple(gemm_seconds),
    ))  # fmt: skip


def _time_gemm(runtime: Runtime, gemm: MatrixProduct) -> list[float]:
    """Seconds of each repeat, none where the device has no room for the matrices."""
    if runtime.pads.padding is not None:
        return _time(runtime.pads.padding.pad_benchmark, gemm.repeats)
    dtype = runtime.job.args.params_dtype
    try:
        left = torch.ones(gemm.m, gemm.k, dtype=dtype, device="cuda")
        right = torch.ones(gemm.k, gemm.n, dtype=dtype, device="cuda")
        torch.matmul(left, right)  # the first one may choose an algorithm
        return _time(_slowed(runtime, lambda: torch.matmul(left, right)), gemm.repeats)
    except torch.OutOfMemoryError:
        return []


def _slowed(runtime: Runtime, action: Callable[[], Any]) -> Callable[[], Any]:
    slowing = runtime.pads.slowing
    return action if slowing is None else lambda: slowing.stretch(action)


def _time(action: Callable[[], Any], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.monotonic()
        action()
        torch.cuda.synchronize()
        found.append(time.monotonic() - began)
    return found
