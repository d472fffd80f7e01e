# SPDX-License-Identifier: Apache-2.0
"""The order of samples under --dataloader-type cyclic, whatever the plan. Imports torch only.

Megatron's `MegatronPretrainingRandomSampler` gives each replica a part of the data, and shuffles all parts alike, anew
for each epoch. So the order follows from the number of replicas. Here it stays that of the replicas that the job began
with: a sample has a place in the order, and a plan decides which worker reads that place.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Final

import torch

ENDLESS: Final = sys.maxsize
"""Number of places: another epoch follows each."""


class Order:
    """Which sample is at which place.

    Args:
        samples: in the data set.
        micro_batch_size: samples that a replica reads at a time.
        replicas: of the job's own layout.
    """

    def __init__(self, samples: int, micro_batch_size: int, replicas: int) -> None:
        self._samples = samples
        self._size = micro_batch_size
        self._replicas = replicas
        self._part = samples // (micro_batch_size * replicas) * micro_batch_size
        self._epoch = -1
        self._shuffled: list[int] = []

    def index(self, place: int) -> int:
        """The sample at a place, counted from 0 over all epochs.

        Raises:
            ValueError: the samples don't fill a micro-batch of each replica. Nobody may ever read such a split.
        """
        if self._part == 0:
            raise ValueError(f"{self._samples} samples don't fill a micro-batch of {self._size} in each replica")
        epoch, within = divmod(place, self._part * self._replicas)
        step, rest = divmod(within, self._size * self._replicas)
        replica, sample = divmod(rest, self._size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(epoch)
            self._shuffled, self._epoch = torch.randperm(self._part, generator=generator).tolist(), epoch
        return replica * self._part + self._shuffled[step * self._size + sample]


class Shuffled:
    """A batch sampler that gives the places of another one with the samples that are there."""

    def __init__(self, places: Iterable[list[int]], order: Order) -> None:
        self._places, self._order = places, order

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in self._places:
            yield [(place, self._order.index(place)) for place in batch]
