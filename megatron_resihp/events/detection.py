# SPDX-License-Identifier: Apache-2.0
"""What the detector found, and how it went about it.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from megatron_resihp.events.event import Event, event


@event("verdict", written_by="the detector, on node 0")
class Verdict(Event):
    """A worker or a link became slow, changed its speed while slow, or is healthy again."""

    kind: Annotated[str, "compute or link"]
    change: Annotated[str, "onset, severity or recovery"]
    workers: Annotated[tuple[int, ...], "the worker, or the two ends of the link"]
    speed: Annotated[float, "p in (0, 1], relative to its own healthy speed"]
    speed_low: Annotated[float | None, "lower end of the 95 % confidence interval of p"] = None
    speed_high: Annotated[float | None, "its upper end"] = None
    since: Annotated[int, "estimated first iteration of the change"]
    iteration: Annotated[int, "iteration whose records decided"]
    evidence: Annotated[Mapping[str, float] | None, "what it rests on, by name"] = None
    relapses: Annotated[
        int | None, "of an onset: how often in succession it has looked healthy without work, and was slow with it"
    ] = None


@event("suspicion", written_by="the detector, on node 0")
class Suspicion(Event):
    """One of several workers is slow and the evidence does not say which: they are validated. Written again if that
    named no worker; then they are validated again later."""

    workers: Annotated[tuple[int, ...], "the suspects"]
    speed: Annotated[float, "p of that worker or link"]
    since: Annotated[int, "estimated first iteration"]
    iteration: Annotated[int, "when"]
    tested: Annotated[bool, "whether validation is over, and named no worker or link"]


@event("validation", written_by="each worker that took part")
class Validation(Event):
    """Micro-benchmarks between two iterations, because the evidence left several suspects."""

    number: Annotated[int, "of the validation"]
    iteration: Annotated[int, "after which it ran"]
    seconds: Annotated[float, "what it cost this worker"]
    gemm_seconds: Annotated[tuple[float, ...], "each repeat of a matrix product; empty: the device had no room for it"]


@event("notice", written_by="the detector, on node 0")
class Notice(Event):
    """Something took time that is no device's doing, such as a stalled data loader. Told once it has cost a second in
    all, each time that has grown tenfold, and when a single one is twice as long as all before it."""

    what: Annotated[str, "data: waits for data; work_of_a_stage: all replicas had more to do in a stage"]
    workers: Annotated[tuple[int, ...], "the workers that it has held up since it was told last"]
    seconds: Annotated[float, "the longest of their waits in this iteration"]
    iteration: Annotated[int, "when"]
    times: Annotated[int | None, "how many iterations it has held up so far"] = None
    total_s: Annotated[float | None, "what these have cost"] = None
    longest_s: Annotated[float | None, "what the longest of them has"] = None


@event("detection_resumed", written_by="the detector, on node 0")
class DetectionResumed(Event):
    """The detector was given what an earlier run has learned."""

    path: Annotated[str, "the file"]
    fits: Annotated[bool, "whether it fits this job; if not, warm-up is as usual"]
    iteration: Annotated[int, "when that was known; if it fits, later ones are judged"]


@event("detection", written_by="the detector, on node 0")
class Detection(Event):
    """What the detector has seen of the run; written at its end."""

    iterations: Annotated[int, "iterations that were judged"]
    records: Annotated[int, "records of workers that arrived"]
    faults: Annotated[Mapping[str, float], "what was dropped or left out, and how often; see `detector.input.counters`"]
    warm: Annotated[bool, "whether there were iterations enough to learn what is normal"]
    held_up_s: Annotated[Mapping[str, float] | None, "seconds that each kind of `notice` has cost in all"] = None


@event("detection_failed", written_by="the detector, on node 0")
class DetectionFailed(Event):
    """A part of the detector has given up; training and the rest go on."""

    part: Annotated[str, "verdicts, recording or cost model"]
    error: Annotated[str, "why"]
