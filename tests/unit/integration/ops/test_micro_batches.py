# SPDX-License-Identifier: Apache-2.0
"""Micro-batches by their index, for all chunks of a worker."""

from __future__ import annotations

from megatron_resihp.integration.ops.micro_batches import MicroBatches


def test_each_chunk_has_its_own() -> None:
    """Megatron's own script empties what it is given of all that a stage doesn't need, in place."""
    loader = iter([{"tokens": 10, "labels": 20}, {"tokens": 11, "labels": 21}])
    batches = MicroBatches(loader, [0, 1], {0: 2, 1: 2})
    for micro_batch in (0, 1):
        first = next(batches.iterator(micro_batch))
        first["labels"] = None
        last = next(batches.iterator(micro_batch))
        assert last == {"tokens": 10 + micro_batch, "labels": 20 + micro_batch}


def test_what_is_read_last_leaves_the_loader_at_the_next_iteration() -> None:
    loader = iter(range(4))
    batches = MicroBatches(loader, [2, 0, 1], {2: 1, 0: 1, 1: 1})
    assert next(batches.iterator(0)) == 1
    batches.finish()
    assert next(loader) == 3
