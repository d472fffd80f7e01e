# SPDX-License-Identifier: Apache-2.0
"""A recovery of a job that fills much of the device: whether old and new state are there together. Imports torch."""

from __future__ import annotations

from typing import Any, Final

import torch
from launching import Launched, launch
from setting import Row, Setting

from megatron_resihp.events.epochs import Phase
from megatron_resihp.events.log import FILE_NAME, read_events
from megatron_resihp.events.workers import Resources

CASES: Final = {"55-percent": 0.55, "85-percent": 0.85}
BYTES_PER_PARAMETER: Final = 14
"""A parameter in bf16, and its gradient, its copy and its momentum in fp32."""
OPTIMIZER: Final = ("--optimizer", "sgd", "--weight-decay", "0")
"""torch's Adam, which has no temporaries only if it is fused, would not fit beside 85 % of the device."""
WIDTH: Final = 6144
REHEARSED_LAYERS: Final = 2


def run(setting: Setting, name: str) -> Row:
    if setting.stand_in:
        layers, model = REHEARSED_LAYERS, dict[str, Any]()
    else:
        layers = _layers(CASES[name], torch.cuda.mem_get_info()[1])
        model = {"hidden-size": WIDTH, "num-attention-heads": 48}
    flags = ["--bf16", *OPTIMIZER, "--resihp-inject", "rebuild:0@4"]
    job = launch(setting, name, 1, flags, **{"num-layers": layers, "train-iters": 8, **model})
    survived = job.codes == [0] and len(job.summary.recoveries) == 1
    return {"ok": survived, "codes": job.codes, "layers": layers, "share_of_memory": CASES[name], **_took(job)}


def _took(job: Launched) -> Row:
    """The peak memory of old and new state together, and of the device in each phase of the recovery, as shares of the
    old state with its gradients; and what went through host memory."""
    events = read_events(job.run_dir / FILE_NAME).events
    took = next((event for event in events if isinstance(event, Resources)), None)
    if took is None or not took.bytes_before:
        return {}
    before = took.bytes_before
    peaks = {event.phase: event.peak_bytes for event in events if isinstance(event, Phase)}
    return {
        "peak_of_state": [round((took.bytes_most or 0) / before, 3)],
        "peak_by_phase": {phase: round(peak / before, 3) for phase, peak in peaks.items() if peak},
        "share_through_host": round((took.bytes_to_host or 0) / before, 3),
    }


def _layers(share: float, memory_bytes: int) -> int:
    """The number of layers whose state takes this share of the device."""
    return max(1, round(share * memory_bytes / (12 * WIDTH**2 * BYTES_PER_PARAMETER)))
