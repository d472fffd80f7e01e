# SPDX-License-Identifier: Apache-2.0
"""A synthetic training job as a detector sees it, with the truth about its faults.

Inside a TP group, fast members wait for the slow one in the collectives of F and B, so an op lasts equally long on all
of them. How long each one waited is known only for a sample of micro-batches, as on a GPU. The micro-batch axis of all
arrays is a worker's own micro-batches, in order. Imports numpy, `pipeline` and `detector`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.records import OpKind, SpanKind
from megatron_resihp.detector.verdict import Kind
from megatron_resihp.lab.detection.faults import Fault, burst_factors, fault_factors
from megatron_resihp.lab.detection.noise import Noise, op_factors, shared_factors
from megatron_resihp.lab.detection.shapes import (
    GPUS_PER_NODE,
    LINK_LATENCY,
    NETWORK_BANDWIDTH,
    NODE_BANDWIDTH,
    OPTIMIZER_SECONDS,
    Shape,
    op_costs,
)
from megatron_resihp.pipeline.program import Program
from megatron_resihp.pipeline.schedules import one_f_one_b, zero_bubble_h1
from megatron_resihp.pipeline.simulate import makespans
from megatron_resihp.simulator.documents import draw_regimes, draw_squares

DEVICE_SPREAD = 0.01
"""Relative standard deviation of healthy devices' own speeds."""
OTHER_NOISE = 0.01
"""Relative standard deviation of gradient sync and optimizer."""
SMALLEST = 1e-3
"""Least factor, so that noise makes no time negative."""


class Schedule(StrEnum):
    """The order of a pipeline's ops."""

    ONE_F_ONE_B = "1f1b"
    ZERO_BUBBLE = "zbh1"

    def program(self, stages: int, micro_batches: int) -> Program:
        make = one_f_one_b if self is Schedule.ONE_F_ONE_B else zero_bubble_h1
        return make(stages, micro_batches)


@dataclass(frozen=True)
class JobSpec:
    """The settings of a synthetic job.

    Attributes:
        shape: model and parallelism.
        sequence: tokens of a micro-batch.
        micro_batches: per replica in an iteration.
        schedule: order of ops.
        noise: of devices and links.
        iterations: length of the job.
        timed_every: in-TP waiting is timed in one of this many micro-batches, another one each iteration.
    """

    shape: Shape
    sequence: int
    micro_batches: int
    schedule: Schedule
    noise: Noise
    iterations: int = 300
    timed_every: int = 4


@dataclass(frozen=True)
class SyntheticJob:
    """Measurements of a whole job. W: workers, L: links, M: micro-batches of a replica.

    Attributes:
        spec: the job's settings.
        layout: positions of the workers.
        program: the program of each replica's pipeline.
        faults: the truth.
        squares: [iterations, replicas, M] Σ l².
        own: [iterations, W, kinds, M] own compute of each op in seconds; kinds are F, B and, if split, W.
        durations: the same with waits and collectives, shape [iterations, stages, replicas, kinds, M]; NaN if the op
            has no collectives, so that it lasts as long as the worker's own compute.
        transfers: [iterations, L, 2 M] seconds of each transfer, activations first.
        seconds: [iterations] the job's iteration time.
        gradient_sync: [iterations, replicas] seconds in gradient sync, with waits for other replicas.
        optimizer: [iterations] seconds in the optimizer.
    """

    spec: JobSpec
    layout: Layout
    program: Program
    faults: tuple[Fault, ...]
    squares: NDArray[np.float64]
    own: NDArray[np.float32]
    durations: NDArray[np.float32]
    transfers: NDArray[np.float32]
    seconds: NDArray[np.float64]
    gradient_sync: NDArray[np.float64]
    optimizer: NDArray[np.float64]

    def observations(self) -> Iterator[IterationObservations]:
        """Each iteration as the detector's input."""
        return map(self.iteration, range(1, self.spec.iterations + 1))

    def iteration(self, number: int) -> IterationObservations:
        """One iteration, numbered from 1."""
        layout, at, micro_batches = self.layout, number - 1, self.spec.micro_batches
        own = self.own[at]
        workers, kinds = own.shape[:2]
        whole = self.durations[at][layout.stage, layout.replica]
        has_collectives = np.isfinite(whole)
        is_timed = (np.arange(micro_batches) + number) % self.spec.timed_every == 0
        compute = np.full((workers, len(OpKind), 1, micro_batches), np.nan)
        compute[:, :kinds, 0] = np.where(has_collectives, whole, own)
        waited = np.full_like(compute, np.nan)
        waited[:, :kinds, 0] = np.where(has_collectives, np.where(is_timed, whole - own, np.nan), 0.0)
        spans = np.zeros((workers, len(SpanKind)))
        spans[:, SpanKind.GRADIENT_SYNC] = self.gradient_sync[at][layout.replica]
        spans[:, SpanKind.OPTIMIZER] = self.optimizer[at]
        sizes = self.spec.shape.boundary_bytes(self.spec.sequence)
        transfer = self.transfers[at].astype(np.float64)
        return IterationObservations(
            epoch=layout.epoch,
            iteration=number,
            compute=compute,
            waited=waited,
            tokens=np.full((workers, micro_batches), float(self.spec.sequence)),
            squares=self.squares[at][layout.replica],
            transfer=transfer,
            transfer_bytes=np.full_like(transfer, sizes),
            spans=spans,
            seconds=np.full(workers, self.seconds[at]),
            reported=np.ones(workers, dtype=np.bool_),
        )


def make_layout(shape: Shape) -> Layout:
    """Workers in Megatron's order: TP varies fastest, then DP, then PP."""
    workers = np.arange(shape.workers)
    tp_rank = workers % shape.tensor_parallel
    replica = workers // shape.tensor_parallel % shape.data_parallel
    stage = workers // (shape.tensor_parallel * shape.data_parallel)
    senders = workers[stage < shape.pipeline_parallel - 1]
    links = np.stack([senders, senders + shape.tensor_parallel * shape.data_parallel], axis=1)
    return Layout(0, workers, replica, stage, tp_rank, workers // GPUS_PER_NODE, links)


def make_job(spec: JobSpec, faults: tuple[Fault, ...], rng: np.random.Generator) -> SyntheticJob:
    """Simulate a job; the same arguments and generator state give the same job."""
    layout = make_layout(spec.shape)
    program = spec.schedule.program(spec.shape.pipeline_parallel, spec.micro_batches)
    regimes = draw_regimes(spec.iterations, spec.sequence, rng)
    replicas = spec.shape.data_parallel
    squares = draw_squares(regimes, replicas * spec.micro_batches, spec.sequence, rng)
    squares = squares.reshape(spec.iterations, replicas, spec.micro_batches)
    own = _own_compute(spec, layout, squares, faults, program.splits_backward, rng)
    durations = _durations(spec, own, program.splits_backward)
    transfers = _transfers(spec, layout, faults, rng)
    pipelines = _pipeline_seconds(spec, program, layout, own, durations, transfers)
    sync = spec.shape.gradient_sync_seconds() * _factors(spec.iterations, rng)
    optimizer = OPTIMIZER_SECONDS * _factors(spec.iterations, rng)
    slowest = pipelines.max(axis=1)
    return SyntheticJob(
        spec, layout, program, faults, squares, own, durations, transfers,
        seconds=slowest + sync + optimizer,
        gradient_sync=sync[:, None] + slowest[:, None] - pipelines,
        optimizer=optimizer,
    )  # fmt: skip


def _factors(count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    return np.maximum(1 + OTHER_NOISE * rng.standard_normal(count), SMALLEST)


def _own_compute(
    spec: JobSpec,
    layout: Layout,
    squares: NDArray[np.float64],
    faults: tuple[Fault, ...],
    splits_backward: bool,
    rng: np.random.Generator,
) -> NDArray[np.float32]:
    """[iterations, workers, kinds, micro-batches]."""
    kinds = 3 if splits_backward else 2
    costs = op_costs(spec.shape, splits_backward)
    level = (costs.per_token * spec.sequence + costs.fixed)[:kinds].astype(np.float32)
    slope = costs.per_square[:kinds].astype(np.float32)
    # [iterations, stages, replicas, 1, kinds, micro-batches]; a TP group's members have the same work.
    healthy = slope.T[None, :, None, None, :, None] * squares.astype(np.float32)[:, None, :, None, None, :]
    healthy += level.T[None, :, None, None, :, None]
    factors = shared_factors(spec.noise, spec.iterations, layout.node, rng)
    factors *= 1 + DEVICE_SPREAD * rng.standard_normal(layout.workers.size)
    factors *= fault_factors(faults, Kind.COMPUTE, layout.workers[:, None], spec.iterations, rng)
    own = op_factors(spec.noise, (spec.iterations, layout.workers.size, kinds, spec.micro_batches), rng)
    own *= factors.astype(np.float32)[:, :, None, None]
    shape = spec.iterations, spec.micro_batches
    if (bursts := burst_factors(faults, Kind.COMPUTE, layout.workers[:, None], shape, rng)) is not None:
        own *= bursts[:, :, None]
    grouped = own.reshape(spec.iterations, spec.shape.pipeline_parallel, spec.shape.data_parallel, -1, *own.shape[2:])
    grouped *= healthy
    return own


def _durations(spec: JobSpec, own: NDArray[np.float32], splits_backward: bool) -> NDArray[np.float32]:
    """An op's duration on all members of a TP group: its slowest member's compute, and the collectives."""
    shape = spec.shape
    grouped = own.reshape(
        spec.iterations, shape.pipeline_parallel, shape.data_parallel, shape.tensor_parallel, *own.shape[2:]
    )
    durations = grouped.max(axis=3)
    collectives = op_costs(shape, splits_backward).collectives[: own.shape[2]] * spec.sequence
    durations += collectives.T.astype(np.float32)[None, :, None, :, None]
    durations[:, :, :, OpKind.W :] = np.nan
    return durations


def _transfers(
    spec: JobSpec, layout: Layout, faults: tuple[Fault, ...], rng: np.random.Generator
) -> NDArray[np.float32]:
    """[iterations, links, 2 · micro-batches]: latency + bytes / bandwidth, the whole of it noisy."""
    node = layout.node[layout.links]
    bandwidth = np.where(node[:, 0] == node[:, 1], NODE_BANDWIDTH, NETWORK_BANDWIDTH)
    bandwidth = bandwidth / fault_factors(faults, Kind.LINK, layout.links, spec.iterations, rng)
    times = LINK_LATENCY + spec.shape.boundary_bytes(spec.sequence) / bandwidth
    times *= shared_factors(spec.noise, spec.iterations, node[:, 0], rng)
    times *= 1 + DEVICE_SPREAD * rng.standard_normal(len(layout.links))
    noise = op_factors(spec.noise, (*times.shape, 2 * spec.micro_batches), rng)
    shape = spec.iterations, 2 * spec.micro_batches
    if (bursts := burst_factors(faults, Kind.LINK, layout.links, shape, rng)) is not None:
        noise *= bursts
    return noise * times.astype(np.float32)[:, :, None]


def _pipeline_seconds(
    spec: JobSpec,
    program: Program,
    layout: Layout,
    own: NDArray[np.float32],
    durations: NDArray[np.float32],
    transfers: NDArray[np.float32],
) -> NDArray[np.float64]:
    """[iterations, replicas] seconds of the pipelines; a stage goes on once all its TP members can."""
    shape, micro_batches = spec.shape, spec.micro_batches
    grid = (spec.iterations, shape.pipeline_parallel, shape.data_parallel, shape.tensor_parallel)
    slowest = own.reshape(*grid, *own.shape[2:]).max(axis=3)
    ops = np.zeros((spec.iterations, shape.data_parallel, len(OpKind), shape.pipeline_parallel, micro_batches))
    ops[:, :, : own.shape[2]] = np.where(np.isfinite(durations), durations, slowest).transpose(0, 2, 3, 1, 4)
    # Links are in the order of their senders, which are all workers but the last stage's.
    lanes = transfers.reshape(spec.iterations, grid[1] - 1, *grid[2:], 2, micro_batches).max(axis=3)
    edges = lanes.transpose(0, 2, 3, 1, 4).astype(np.float64)
    times = makespans(program, ops.reshape(-1, *ops.shape[2:]), edges.reshape(-1, *edges.shape[2:]))
    return times.reshape(spec.iterations, shape.data_parallel)
