# SPDX-License-Identifier: Apache-2.0
"""Searches the fastest pipeline for a job: layers, devices and order of ops together. Imports numpy.

AdaPtis (arXiv 2509.23722): partition, placement and schedule change in turn, judged by simulation. The main cause of
lost time decides which changes next.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from megatron_resihp.pipeline.program import Program, ProgramError
from megatron_resihp.pipeline.schedules import interleaved
from megatron_resihp.pipeline.search.annealing import anneal
from megatron_resihp.pipeline.search.bounds import makespan_lower_bound
from megatron_resihp.pipeline.search.job import Layout, PipelineJob
from megatron_resihp.pipeline.search.list_scheduling import list_schedule
from megatron_resihp.pipeline.search.partition import balanced, in_turns, least_variance, zigzag
from megatron_resihp.pipeline.simulate import simulate
from megatron_resihp.pipeline.times import Array

EFFORT = 200_000_000
"""Ops that trials run: a second or two on one core."""
MOST_CHUNKS = 5
"""Most chunks of each device."""
_ROUNDS = 3
_VARIANTS = 4
"""Most partitions that are tried for each placement."""
_EFFORT_FOR_ANOTHER = 50_000_000
_SHARES = (0.25, 0.12, 0.12, 0.06, 0.06, 0.06)
"""Shares of the effort for candidates in the order of their makespans; the rest goes to the best of them."""
_MOVED_LAYERS = {"partition": 0.1, "schedule": 0.01}
"""Share of moves that move a layer, by tuning phase."""
_MARGIN = 4e-9
"""Share of a device's memory that is left out, because programs fit their limits only up to rounding."""


@dataclass(frozen=True)
class Pipeline:
    """A layout with a program and its makespan in seconds."""

    layout: Layout
    program: Program
    makespan: float


def tuned_pipeline(
    job: PipelineJob, known: Iterable[Layout] = (), effort: int = EFFORT, seed: int = 0, most_chunks: int = MOST_CHUNKS
) -> Pipeline:
    """The fastest layout and order of ops that can be found.

    Args:
        job: the job.
        known: layouts that may be good; the result is no slower than Megatron's order for them.
        effort: how many ops trials run.
        seed: for the trials.
        most_chunks: of a device.

    Raises:
        ProgramError: no layout tried fits into memory.
    """
    variants = min(1 + effort // _EFFORT_FOR_ANOTHER, _VARIANTS)
    candidates = _candidates(job, dict.fromkeys([*known, *_placements(job, most_chunks, variants)]))
    tuned = [
        _by_bottleneck(job, each, int(share * effort), seed)
        for each, share in zip([each for each in candidates if each.program.splits_backward], _SHARES, strict=False)
    ]
    best = min([*tuned, candidates[0]], key=_makespan)
    if not best.program.splits_backward:
        return best
    return _by_bottleneck(job, best, int((1 - sum(_SHARES)) * effort), seed + 1)


def lower_bound(job: PipelineJob, layout: Layout) -> float:
    """Least seconds of any order of ops for a layout, with unlimited memory."""
    durations, hops = job.durations(layout), job.hops(layout)
    return makespan_lower_bound(layout.homes, durations, hops, splits_backward=True)


def _placements(job: PipelineJob, most_chunks: int, variants: int) -> Iterable[Layout]:
    for chunks in range(1, most_chunks + 1):
        if chunks * job.devices > job.layers:
            return
        for homes in dict.fromkeys((in_turns(job.devices, chunks), zigzag(job.devices, chunks))):
            layout = least_variance(job, homes)
            yield layout
            yield from (balanced(job, layout, seed) for seed in range(variants))


def _candidates(job: PipelineJob, layouts: Iterable[Layout]) -> list[Pipeline]:
    """Megatron's order for all layouts, and list scheduling for those that can be fastest; sorted by makespan.

    Raises:
        ProgramError: no layout fits into memory; the message is about the layout that lacks least.
    """
    lacking = {layout: _lacking(job, layout) for layout in layouts}
    if not lacking:
        raise ProgramError(f"{job.layers} layers are too few for {job.devices} devices")
    fitting = [layout for layout, bytes_lacking in lacking.items() if bytes_lacking <= 0]
    if not fitting:
        raise ProgramError(f"a device lacks {min(lacking.values()):g} bytes for its layers and one micro-batch")
    found = [each for layout in fitting for each in _of_megatron(job, layout)]
    bounds = sorted((lower_bound(job, layout), number) for number, layout in enumerate(fitting))
    for listed, (bound, number) in enumerate(bounds):
        if listed >= len(_SHARES) and bound >= min(map(_makespan, found)):
            break
        found.append(_listed(job, fitting[number]))
    return sorted(found, key=_makespan)


def _lacking(job: PipelineJob, layout: Layout) -> float:
    """The most bytes that a device lacks for its layers and one micro-batch; at most 0 if none lacks any."""
    needed = np.bincount(layout.homes, job.sizes(layout)[:, 0], job.devices)
    return float((needed - _room(job, layout)).max())


def _room(job: PipelineJob, layout: Layout) -> Array:
    return job.room(layout) * (1 - _MARGIN)


def _listed(job: PipelineJob, layout: Layout) -> Pipeline:
    durations, hops, sizes = job.durations(layout), job.hops(layout), job.sizes(layout)
    program = list_schedule(layout.homes, durations, hops, _room(job, layout), sizes, job.kept_until_w)
    return _timed(job, layout, program)


def _of_megatron(job: PipelineJob, layout: Layout) -> list[Pipeline]:
    """Megatron's own order for this layout, if it has one and memory allows."""
    chunks, rest = divmod(len(layout.homes), job.devices)
    if rest or layout.homes != in_turns(job.devices, chunks):
        return []
    program = interleaved(job.devices, chunks, job.micro_batches)
    return [_timed(job, layout, program)] if job.fits(layout, program) else []


def _timed(job: PipelineJob, layout: Layout, program: Program) -> Pipeline:
    durations = job.durations(layout, program.splits_backward)
    return Pipeline(layout, program, simulate(program, durations, job.hops(layout)).makespan)


def _by_bottleneck(job: PipelineJob, pipeline: Pipeline, effort: int, seed: int) -> Pipeline:
    """Tune the main cause of lost time: the partition if the layout is, the schedule if the order of ops is."""
    for number in range(_ROUNDS):
        least = lower_bound(job, pipeline.layout)
        phase = "partition" if least - job.floor > pipeline.makespan - least else "schedule"
        pipeline = _tuned(job, pipeline, effort // _ROUNDS, _MOVED_LAYERS[phase], seed + number)
    return pipeline


def _tuned(job: PipelineJob, pipeline: Pipeline, effort: int, move_layers: float, seed: int) -> Pipeline:
    roomy = replace(job, limit=np.asarray(job.limit) * (1 - _MARGIN / 2))
    tries = effort // max(len(pipeline.program.flat), 1)
    return _timed(job, *anneal(roomy, pipeline.layout, pipeline.program, tries, move_layers, seed))


def _makespan(pipeline: Pipeline) -> float:
    return pipeline.makespan
