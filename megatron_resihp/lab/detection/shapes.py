# SPDX-License-Identifier: Apache-2.0
"""Costs of published models' ops on a healthy cluster: T = αN + βΣl² + γ for each kind of op and stage.

Models and their TP, DP and PP degrees are those of ResiHP (arXiv 2605.06374, section 8), with 8 GPUs per node and 200
Gb/s between nodes. Rates are round figures for an A100, as only ratios matter to a detector. Imports numpy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GEMM_RATE = 150e12
"""FLOP/s that matrix products reach."""
ATTENTION_RATE = 75e12
"""FLOP/s that attention kernels reach."""
NODE_BANDWIDTH = 200e9
"""Bytes/s between two GPUs of a node."""
NETWORK_BANDWIDTH = 25e9 / 8
"""Bytes/s between GPUs of two nodes while all 8 GPUs of a node send."""
LINK_LATENCY = 20e-6
GPUS_PER_NODE = 8
VOCABULARY = 32_000
BYTES_PER_VALUE = 2
LAUNCH_SECONDS = 1e-4
"""Seconds per layer and pass, whatever the size."""
EMBEDDING_LAYERS = 0.05
"""The embedding's work as a share of a layer's matrix products."""
EXPOSED_SYNC = 0.25
"""Share of the gradient sync that is not hidden behind the backward."""
OPTIMIZER_SECONDS = 0.02


@dataclass(frozen=True)
class Shape:
    """A model and its degrees of parallelism."""

    name: str
    tensor_parallel: int
    data_parallel: int
    pipeline_parallel: int
    layers: int
    hidden: int

    @property
    def workers(self) -> int:
        return self.tensor_parallel * self.data_parallel * self.pipeline_parallel

    def stage_layers(self) -> NDArray[np.int64]:
        """Layers of each stage; if they do not divide evenly, the first stages hold one more."""
        share, rest = divmod(self.layers, self.pipeline_parallel)
        return share + (np.arange(self.pipeline_parallel) < rest).astype(np.int64)

    def boundary_bytes(self, tokens: int) -> float:
        """Bytes that one worker sends to the next stage: its TP share of the activations."""
        return BYTES_PER_VALUE * self.hidden * tokens / self.tensor_parallel

    def gradient_sync_seconds(self) -> float:
        """A ring all-reduce of the layers' gradients; a node's 8 GPUs are in different rings."""
        parameters = 12 * self.hidden**2 * self.layers / (self.tensor_parallel * self.pipeline_parallel)
        share = 2 * (self.data_parallel - 1) / self.data_parallel
        return EXPOSED_SYNC * share * BYTES_PER_VALUE * parameters / NETWORK_BANDWIDTH


SHAPES = (
    Shape("7b", 4, 2, 2, layers=32, hidden=4096),
    Shape("30b", 4, 2, 8, layers=60, hidden=6656),
    Shape("70b", 4, 4, 16, layers=80, hidden=8192),
)
"""Shapes of 16, 64 and 256 workers."""


@dataclass(frozen=True)
class OpCosts:
    """Seconds of each op; arrays are [3 (F, B, W), stages].

    Attributes:
        per_token, per_square, fixed: α, β and γ of an op's own compute.
        collectives: seconds of its tensor-parallel collectives per token, without waits.
    """

    per_token: NDArray[np.float64]
    per_square: NDArray[np.float64]
    fixed: NDArray[np.float64]
    collectives: NDArray[np.float64]


def op_costs(shape: Shape, splits_backward: bool) -> OpCosts:
    """The costs of a shape's ops; if the backward is not split, W costs nothing and B has all of it."""
    # Passes over the matrix products, and over attention, whose backward computes the scores again.
    gemm_passes = np.array([1.0, 1.0, 1.0] if splits_backward else [1.0, 2.0, 0.0])
    attention_passes = np.array([1.0, 2.5, 0.0])
    exists = gemm_passes > 0
    layers = shape.stage_layers()
    layer_flop = 24 * shape.hidden**2
    gemm_flop = layers * layer_flop
    gemm_flop = gemm_flop + np.where(np.arange(layers.size) == 0, EMBEDDING_LAYERS * layer_flop, 0)
    gemm_flop = gemm_flop + np.where(np.arange(layers.size) == layers.size - 1, 2 * shape.hidden * VOCABULARY, 0)
    attention_flop = layers * 2 * shape.hidden  # per token and token before it: two products, half of them masked
    # Two all-reduces a layer and pass, as rings, except for weight gradients, which need none.
    ring = 2 * (shape.tensor_parallel - 1) / shape.tensor_parallel
    all_reduce = 2 * ring * BYTES_PER_VALUE * shape.hidden / NODE_BANDWIDTH
    return OpCosts(
        per_token=np.outer(gemm_passes, gemm_flop) / (shape.tensor_parallel * GEMM_RATE),
        per_square=np.outer(attention_passes, attention_flop) / (shape.tensor_parallel * ATTENTION_RATE),
        fixed=np.outer(exists * LAUNCH_SECONDS, layers),
        collectives=np.outer([1.0, 1.0, 0.0], layers) * all_reduce,
    )
