# SPDX-License-Identifier: Apache-2.0
"""Synthetic records of a large healthy job's workers, as thousands of probes would send them to the coordinator.

For `overhead.py`. 1F1B's ops and transfers with documents that differ, ops that scatter by 3 %, devices by 1 % and
transfers by 5 %; members of a tensor-parallel group wait for the slowest, which is timed on one micro-batch in four;
node n's clock shows n seconds too much. May import numpy and `megatron_resihp` without torch.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.input.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord, OpKind, SpanKind
from megatron_resihp.detector.input.wire import pack
from megatron_resihp.plan.parallel_plan import ParallelPlan, Replica

TENSOR_PARALLEL: Final = 8
"""As many as a node has workers."""
PIPELINE_PARALLEL: Final = 16
MICRO_BATCHES: Final = 16
SEQUENCE: Final = 8192
ACTIVATION_BYTES: Final = float(1 << 27)
OP_NOISE, DEVICE_NOISE, TRANSFER_NOISE = 0.03, 0.01, 0.05
FORWARD_S, TRANSFER_S, SLOT_S, OTHER_S = 0.020, 0.003, 0.06, 0.05
ITERATION_S: Final = 2 * MICRO_BATCHES * SLOT_S + 10 * OTHER_S
SPANS: Final = (SpanKind.DATA, SpanKind.GRADIENT_SYNC, SpanKind.AGREEMENT, SpanKind.OPTIMIZER)
# A stage's transfers: kind, whether it receives, and from or to which stage.
TRANSFERS: Final = ((OpKind.F, 1, -1), (OpKind.F, 0, 1), (OpKind.B, 1, 1), (OpKind.B, 0, -1))


class SyntheticWorkers:
    """A job of `replicas` × 16 stages × 8 tensor-parallel members, 16 micro-batches to a replica."""

    def __init__(self, replicas: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._shape = replicas, PIPELINE_PARALLEL, TENSOR_PARALLEL
        self.ids = np.arange(np.prod(self._shape)).reshape(self._shape)
        self._device = self._scatter(DEVICE_NOISE, *self._shape)

    @property
    def count(self) -> int:
        return int(self.ids.size)

    def plan(self) -> ParallelPlan:
        return ParallelPlan(tuple(
            Replica(tuple(map(tuple, stages)), tuple(range(number * MICRO_BATCHES, (number + 1) * MICRO_BATCHES)))
            for number, stages in enumerate(self.ids.tolist())
        ))  # fmt: skip

    def messages(self, iteration: int) -> list[bytes]:
        """The messages of all workers for an iteration, in the order of their ids."""
        squares = self._random.lognormal(np.log(2e7), 0.4, (self._shape[0], MICRO_BATCHES)).clip(1e6, SEQUENCE**2)
        ops, transfers = self._ops(iteration, squares), self._transfers(iteration)
        return [
            pack(self._record(iteration, place, squares[place[0]], ops[place], transfers[place]))
            for place in np.ndindex(*self._shape)
        ]

    def _scatter(self, share: float, *shape: int) -> NDArray[np.float64]:
        return 1 + share * self._random.standard_normal(shape, dtype=np.float32).astype(np.float64)

    def _start(self, iteration: int) -> NDArray[np.float64]:
        """[replicas, stages, members] on each worker's own clock."""
        return ITERATION_S * iteration + self.ids // TENSOR_PARALLEL

    def _ops(self, iteration: int, squares: NDArray[np.float64]) -> NDArray[np.void]:
        """[replicas, stages, members, 2 × micro-batches]"""
        number = np.tile(np.arange(MICRO_BATCHES), 2)
        kind = np.repeat([OpKind.F, OpKind.B], MICRO_BATCHES)
        healthy = FORWARD_S * (1 + kind) * (0.7 + 0.3 * squares[:, number] / 2e7)
        own = healthy[:, None, None] * self._device[..., None] * self._scatter(OP_NOISE, *self._shape, number.size)
        slowest = own.max(axis=2, keepdims=True)
        ops = np.zeros(own.shape, OP)
        ops["kind"] = kind
        ops["micro_batch"] = (np.arange(self._shape[0])[:, None] * MICRO_BATCHES + number)[:, None, None]
        ops["start"] = self._start(iteration)[..., None] + SLOT_S * np.arange(number.size)
        ops["end"] = ops["start"] + slowest
        ops["waited"] = np.where((number + iteration) % 4 == 0, slowest - own, np.nan)
        return ops

    def _transfers(self, iteration: int) -> NDArray[np.void]:
        """[replicas, stages, members, 4, micro-batches]; those with stages that are not there are not to be used."""
        transfers = np.zeros((*self._shape, len(TRANSFERS), MICRO_BATCHES), TRANSFER)
        index = np.arange(self._shape[0])[:, None] * MICRO_BATCHES + np.arange(MICRO_BATCHES)
        transfers["micro_batch"], transfers["bytes"] = index[:, None, None, None], ACTIVATION_BYTES
        start = self._start(iteration)[..., None]
        for place, (kind, received, step) in enumerate(TRANSFERS):
            part = transfers[..., place, :]
            part["kind"], part["received"] = kind, received
            part["peer"] = (self.ids + step * TENSOR_PARALLEL)[..., None] % self.count
            part["posted"] = start + SLOT_S * (kind * MICRO_BATCHES + np.arange(MICRO_BATCHES)) + 0.01 * received
            part["done"] = part["posted"] + TRANSFER_S * self._scatter(TRANSFER_NOISE, *part.shape)
        return transfers

    def _record(
        self,
        iteration: int,
        place: tuple[int, ...],
        squares: NDArray[np.float64],
        ops: NDArray[np.void],
        transfers: NDArray[np.void],
    ) -> IterationRecord:
        replica, stage, _ = place
        worker = int(self.ids[place])
        there = [number for number, (_, _, step) in enumerate(TRANSFERS) if 0 <= stage + step < PIPELINE_PARALLEL]
        workload, spans = np.zeros(MICRO_BATCHES, WORKLOAD), np.zeros(len(SPANS), SPAN)
        workload["micro_batch"] = replica * MICRO_BATCHES + np.arange(MICRO_BATCHES)
        workload["tokens"], workload["squares"] = SEQUENCE, squares
        start = ITERATION_S * iteration + worker // TENSOR_PARALLEL
        spans["kind"], spans["start"] = SPANS, start + ITERATION_S - OTHER_S * np.arange(len(SPANS), 0, -1)
        spans["end"] = spans["start"] + OTHER_S / 2
        return IterationRecord(
            0, iteration, worker, 0, start, start + ITERATION_S, ops, transfers[there].reshape(-1), workload, spans
        )
