# SPDX-License-Identifier: Apache-2.0
"""What a worker writes to the event log about its iterations and recoveries. May import torch and `runtime`."""

import os
import time
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_resihp.events.epochs import FirstStep, Phase
from megatron_resihp.events.training import Iteration
from megatron_resihp.events.workers import Resources
from megatron_resihp.integration.runtime import Runtime


def report_iteration(runtime: Runtime) -> None:
    """Write what this iteration was to the event log, and what the recovery before it cost."""
    iteration, now = runtime.progress.iteration, time.monotonic()
    outcome = runtime.progress.outcomes[iteration]
    if runtime.view.reports:
        took = Iteration(
            iteration=iteration, agreed_epoch=outcome.epoch, loss=outcome.means,
            grad_norm=outcome.grad_norm, skipped=outcome.skipped, loss_scale=_scale(runtime),
            samples=runtime.job.args.global_batch_size, ends=outcome.stop or None,
            duration_s=None if runtime.recovery.last_step_at is None else now - runtime.recovery.last_step_at,
        )  # fmt: skip
        runtime.control.event_behind(took, *runtime.loads.news(iteration))
    runtime.recovery.last_step_at = now
    if runtime.recovery.since is not None:
        runtime.control.event(FirstStep(
            to_epoch=runtime.epoch, iteration=iteration, seconds_since_death=time.time() - runtime.recovery.since
        ))  # fmt: skip
    report_recovered(runtime)


def _scale(runtime: Runtime) -> float | None:
    """What losses were multiplied by in this iteration; None where that never changes."""
    scale: float | None = runtime.progress.counters[runtime.progress.iteration]["settings"]["scale"].get("scale")
    return scale


def report_recovered(runtime: Runtime) -> None:
    """What the last recovery cost this worker, once, written when the first work after it is done."""
    if runtime.recovery.since is None:
        return
    to_epoch, measured = runtime.epoch, runtime.recovery.phases
    phases = [
        Phase(phase=name, seconds=spent, to_epoch=to_epoch, peak_bytes=measured.peaks.get(name))
        for name, spent in measured.seconds.items()
    ]
    runtime.recovery.since = None
    runtime.communicators.release()
    left_behind = runtime.communicators.left_behind
    took, runtime.recovery.footprint = runtime.recovery.footprint, None
    memory = {} if took is None else {f"bytes_{name}": value for name, value in asdict(took).items()}
    held = Resources(to_epoch=to_epoch, left_behind=left_behind, **resources(), **memory)
    runtime.control.event(*phases, held)


def resources() -> dict[str, int]:
    """What a leak would show in: threads, file descriptors, process groups, resident memory in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }
