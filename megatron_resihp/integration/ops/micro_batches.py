# SPDX-License-Identifier: Apache-2.0
"""Micro-batches by their index in the global batch, read from a loader that gives them one after the other.

A worker's chunks may need the same micro-batch at different times, or in another order than that of the loader, and
some chunks need none. Imports the standard library only.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any


class MicroBatches:
    """The micro-batches of one iteration on one worker.

    Args:
        loader: gives those in `order`, one after the other; nothing is read before a chunk wants it.
        order: their indices.
        uses: how often each of them is wanted at most.
    """

    def __init__(self, loader: Iterator[Any] | None, order: Sequence[int], uses: dict[int, int]) -> None:
        self._loader = loader
        self._waiting = list(reversed(order))
        self._left = dict(uses)
        self._read: dict[int, Any] = {}
        self._touched = False

    def iterator(self, micro_batch: int) -> "OneMicroBatch":
        """An iterator that gives this micro-batch, if it is asked."""
        return OneMicroBatch(self, micro_batch)

    def get(self, micro_batch: int) -> Any:
        """A copy of the micro-batch for one chunk: Megatron's own script removes what its stage doesn't need."""
        self._touched = True
        assert self._loader is not None, "the data set was not built on this rank"
        while micro_batch not in self._read:
            self._read[self._waiting.pop()] = next(self._loader)
        self._left[micro_batch] -= 1
        return copy.copy(self._read[micro_batch]) if self._left[micro_batch] else self._read.pop(micro_batch)

    def finish(self) -> None:
        """Bring the loader to the next iteration's first micro-batch, if it has been read at all."""
        while self._touched and self._waiting:
            self._waiting.pop()
            assert self._loader is not None
            next(self._loader)


class OneMicroBatch:
    """What stands for the data iterator in one forward step."""

    def __init__(self, batches: MicroBatches, micro_batch: int) -> None:
        self._batches = batches
        self._micro_batch = micro_batch

    def __iter__(self) -> "OneMicroBatch":
        return self

    def __next__(self) -> Any:
        return self._batches.get(self._micro_batch)
