# SPDX-License-Identifier: Apache-2.0
"""The order of shuffled samples is Megatron's own for the job's first replicas, and stays it for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler

from megatron_resihp.integration.patches.shuffling import Order, Shuffled


@given(
    samples=st.integers(1, 60), size=st.integers(1, 4), replicas=st.integers(1, 4), step=st.integers(0, 30),
    steps=st.integers(1, 20),
)  # fmt: skip
def test_the_order_is_megatrons_from_any_step_on_and_from_epoch_to_epoch(
    samples: int, size: int, replicas: int, step: int, steps: int
) -> None:
    together = size * replicas
    if samples < together:
        few = Order(samples, size, replicas)  # as of a split that nobody reads
        with pytest.raises(ValueError, match="don't fill"):
            few.index(0)
        return
    order = Order(samples, size, replicas)
    for rank in range(replicas):
        sampler = MegatronPretrainingRandomSampler(None, samples, step * together, size, rank, replicas, True)
        theirs: list[list[int]] = []
        while len(theirs) < steps:  # as Megatron's `cyclic_iter`
            theirs += list(sampler)
        places = [[(step + each) * together + rank * size + n for n in range(size)] for each in range(steps)]
        found = list(Shuffled(places, order))
        assert [[index for _, index in batch] for batch in found] == theirs[:steps]
        assert [[place for place, _ in batch] for batch in found] == places
