# SPDX-License-Identifier: Apache-2.0
"""Whether a rebuild leaves the old state on the device or moves it to the host first."""

from __future__ import annotations

import pytest

from megatron_resihp.integration.state.room import Room, Way, expected_bytes, way_of
from megatron_resihp.plan import Chunk, OwnSplit, ParallelPlan, Replica, even_chunks

GIB = 1 << 30
BESIDE, THROUGH_HOST = Way


@pytest.mark.parametrize(
    ("new", "device", "host", "ran_out", "way"),
    [
        (40, 60, 100, False, BESIDE),  # all fits
        (60, 60, 100, False, BESIDE),
        (61, 60, 100, False, THROUGH_HOST),
        (61, 60, 49, False, BESIDE),  # the estimate may be wrong, and there is no other way
        (40, 60, 100, True, THROUGH_HOST),  # it was wrong
        (40, 60, 49, True, BESIDE),
        (0, 0, 100, False, BESIDE),  # all is taken over
    ],
)
def test_the_way_that_fits(new: int, device: int, host: int, ran_out: bool, way: Way) -> None:
    assert way_of(Room(new * GIB, 50 * GIB, device * GIB, 0, host * GIB), ran_out) is way


def test_who_holds_nothing_has_nothing_to_move() -> None:
    assert way_of(Room(61, 0, 60, 0, 100), ran_out=True) is BESIDE


def test_what_others_send_needs_host_memory_too() -> None:
    assert way_of(Room(61, 50, 60, received=50, host=99), ran_out=False) is BESIDE
    assert way_of(Room(61, 50, 60, received=50, host=100), ran_out=False) is Way.THROUGH_HOST


def test_parts_of_a_distributed_optimizer_become_whole_where_megatron_s_own_groups_cannot_run_the_plan() -> None:
    sizes = {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "padded_vocab_size": 256,
        "max_position_embeddings": 64,
    }  # fmt: skip
    own = OwnSplit(even_chunks(4, 2), 1)
    chunks = {"own": own.chunks, "others": (Chunk(0, 0, 2), Chunk(1, 2, 6))}
    plans = {name: ParallelPlan((Replica(((0,), (1,)), (0,), each), Replica(((2,), (3,)), (1,), each)))
             for name, each in chunks.items()}  # fmt: skip
    shared, whole = (
        {
            name: expected_bytes({**sizes, "use_distributed_optimizer": flag}, own, plan, 0)
            for name, plan in plans.items()
        }
        for flag in (True, False)
    )
    assert shared["others"] == whole["others"]
    assert (shared["own"] or 0) < (whole["own"] or 0)
