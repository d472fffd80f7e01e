# SPDX-License-Identifier: Apache-2.0
"""A small training job as the detector sees it: 8 workers (TP 2, DP 2, PP 2) on two nodes, with noise and faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.records import OpKind, SpanKind

MICRO_BATCHES = 4
TRANSFER_BYTES = 1e7


def small_layout(epoch: int = 0) -> Layout:
    workers = np.arange(8)
    links = np.array([[worker, worker + 4] for worker in range(4)])
    return Layout(epoch, workers, workers // 2 % 2, workers // 4, workers % 2, workers // 4, links)


@dataclass
class SmallJob:
    """Attributes: slow: worker or link (its ends) → function of the iteration that gives its speed p; `noise`: of each
    op and transfer; `timed`: whether waits in tensor-parallel collectives are timed; `alike`: all documents alike."""

    slow: Mapping[int | tuple[int, int], Callable[[int], float]] = field(default_factory=dict)
    noise: float = 0.01
    timed: bool = True
    alike: bool = False
    scale: float = 1.0
    seed: int = 0
    layout: Layout = field(default_factory=small_layout)

    def iterations(self, last: int, first: int = 1) -> Iterator[IterationObservations]:
        for number in range(first, last + 1):
            yield self.iteration(number)

    def iteration(self, number: int) -> IterationObservations:
        rng = np.random.default_rng((self.seed, number))
        layout, workers = self.layout, self.layout.workers.size
        tokens = np.full((2, MICRO_BATCHES), 8192.0)
        squares = 3e7 if self.alike else rng.uniform(1e7, 6e7, (2, MICRO_BATCHES))
        work = (1e-6 * tokens + 5e-10 * squares)[layout.replica]
        speed = np.array([self._speed(int(worker), number) for worker in layout.workers])
        kinds = np.array([1.0, 2.0])
        noise = 1 + self.noise * rng.standard_normal((workers, 2, MICRO_BATCHES))
        own = self.scale * kinds[:, None] * work[:, None] * noise / speed[:, None, None]
        group = layout.stage * 2 + layout.replica
        whole = np.stack([own[group == each].max(axis=0) for each in group]) * 1.05
        compute = np.full((workers, len(OpKind), 1, MICRO_BATCHES), np.nan)
        compute[:, :2, 0] = whole
        waited = np.full_like(compute, np.nan)
        if self.timed:
            waited[:, :2, 0, number % 2 :: 2] = (whole - own)[..., number % 2 :: 2]
        factor = np.array([1 / self._speed(tuple(pair), number) for pair in layout.links.tolist()])
        transfer = self.scale * 0.003 * factor[:, None] * (1 + self.noise * rng.standard_normal((len(factor), 8)))
        return IterationObservations(
            epoch=layout.epoch,
            iteration=number,
            compute=compute,
            waited=waited,
            tokens=tokens[layout.replica],
            squares=np.broadcast_to(squares, tokens.shape)[layout.replica],
            transfer=transfer,
            transfer_bytes=np.full_like(transfer, TRANSFER_BYTES),
            spans=np.zeros((workers, len(SpanKind))),
            seconds=np.full(workers, self.scale),
            reported=np.ones(workers, dtype=bool),
        )

    def _speed(self, device: int | tuple[int, ...], number: int) -> float:
        return self.slow[device](number) if device in self.slow else 1.0


def from_iteration(onset: int, speed: float, until: int = 10**9) -> Callable[[int], float]:
    return lambda number: speed if onset <= number < until else 1.0


@pytest.fixture
def small_job() -> type[SmallJob]:
    return SmallJob


@pytest.fixture
def slow_from() -> Callable[..., Callable[[int], float]]:
    """(onset, speed, until) → speed as a function of the iteration."""
    return from_iteration
