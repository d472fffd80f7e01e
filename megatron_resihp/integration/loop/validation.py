# SPDX-License-Identifier: Apache-2.0
"""Micro-benchmarks on suspects between two iterations: matrix products of the training's shape, P2P on their links.

They begin after a step. When that step was agreed on, every worker had heard of them, so both ends of a link take part
in the same one. May import megatron, `control`, `detector.input.records` and this package.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron_resihp.detector.input.records import SpanKind
from megatron_resihp.events.detection import Validation
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.protocol.notices import MatrixProduct, Transfer


def validate(runtime: Runtime) -> None:
    """Measure what the order asks of this worker, and tell how long that took. Waits for the device."""
    order = runtime.orders.validation
    assert order is not None
    runtime.orders.validation = None
    gemms = [gemm for gemm in order.gemms if runtime.worker in gemm.workers]
    transfers = [each for each in order.transfers if runtime.worker in (each.sender, each.receiver)]
    if not gemms and not transfers:
        return
    began = time.monotonic()
    with runtime.probes.span(SpanKind.VALIDATION):
        gemm_seconds = [seconds for gemm in gemms for seconds in _time_gemm(runtime, gemm)]
        timed = [_time_transfer(runtime, each) for each in transfers]
    runtime.control.event(Validation(
        number=order.number, iteration=runtime.progress.iteration, seconds=time.monotonic() - began,
        gemm_seconds=tuple(gemm_seconds), transfers=tuple(timed),
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


def _time_transfer(runtime: Runtime, transfer: Transfer) -> dict[str, Any]:
    """There with `size` bytes and back with one element: seconds of each repeat at either end."""
    sends = transfer.sender == runtime.worker
    peer = transfer.receiver if sends else transfer.sender
    rank, group = runtime.view.rank_order.index(peer), runtime.mode.link_group
    # As training sends. With NCCL, what is posted in a batch goes by a communicator that all members of the group make,
    # and what is posted alone by one of the two ends.
    batched = get_model_config(runtime.held.live.model[0]).batch_p2p_comm
    there = torch.zeros(max(transfer.size // 4, 1), dtype=torch.float32, device="cuda")
    back = torch.zeros(1, dtype=torch.float32, device="cuda")

    def travel() -> None:
        work: Any
        for tensor, outward in ((there, True), (back, False)):
            post = dist.isend if outward == sends else dist.irecv
            if batched:
                [work] = dist.batch_isend_irecv([dist.P2POp(post, tensor, rank, group)])
            else:
                work = post(tensor, rank, group)
            work.wait()

    return {"peer": peer, "size": transfer.size, "seconds": _time(travel, transfer.repeats)}


def _time(action: Callable[[], Any], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.monotonic()
        action()
        torch.cuda.synchronize()
        found.append(time.monotonic() - began)
    return found
