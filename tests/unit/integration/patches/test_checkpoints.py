# SPDX-License-Identifier: Apache-2.0
"""A state dict cut and dealt out among workers of unlike shards: all of it is written, and each number once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resihp.integration.patches.checkpoints import leave_other_format_behind, own_parts

LAYERS, ROWS, COLUMNS = 3, 12, 24
AXES = {"column": 0, "row": 1, "whole": None}


class Meeting:
    """Stands for a collective among threads."""

    def __init__(self, count: int) -> None:
        self._barrier = Barrier(count)
        self._given: list[Any] = [None] * count

    def gather(self, rank: int, own: Any) -> list[Any]:
        self._given[rank] = own
        self._barrier.wait(30.0)
        found = list(self._given)
        self._barrier.wait(30.0)
        return found


def whole(name: str) -> torch.Tensor:
    """What the workers hold together, every number another one."""
    start = 10_000 * sorted(AXES).index(name)
    return torch.arange(start, start + LAYERS * ROWS * COLUMNS).reshape(LAYERS, ROWS, COLUMNS)


def shards(layers: range, tp_rank: int, degree: int) -> list[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    found = []
    for name, axis in AXES.items():
        for layer in layers:
            tensor, offsets = whole(name)[layer], [(0, layer, LAYERS)]
            if axis is not None:
                tensor = tensor.chunk(degree, axis)[tp_rank]
                offsets.append((1 + axis, tp_rank, degree))
            found.append(
                ShardedTensor.from_rank_offsets(name, tensor, *offsets, replica_id=tp_rank, prepend_axis_num=1)
            )
    return found


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[range, int, int]]:
    """Layers, TP rank and degree of each worker: replicas of one or two stages of unlike degree."""
    workers = []
    for _ in range(draw(st.integers(1, 3))):
        border = draw(st.integers(0, LAYERS))
        for layers in (range(border), range(border, LAYERS)):
            degree = draw(st.sampled_from([1, 2, 3, 4]))
            workers += [(layers, rank, degree) for rank in range(degree)]
    return workers


@settings(deadline=None, max_examples=50)
@given(layouts())
def test_every_number_is_written_once_in_parts_of_one_shape(layout: list[tuple[range, int, int]]) -> None:
    meeting = Meeting(len(layout))
    with ThreadPoolExecutor(len(layout)) as pool:
        written = pool.map(
            lambda rank: own_parts(shards(*layout[rank]), rank, lambda own: meeting.gather(rank, own)),
            range(len(layout)),
        )
        parts = [part for own in written for part in own]
    for name in AXES:
        found = torch.full((LAYERS, ROWS, COLUMNS), -1)
        mine = [part for part in parts if part.key == name]
        for part in mine:
            part.validate_metadata_integrity()
            assert (found[part.global_slice()] == -1).all(), "written twice"
            found[part.global_slice()] = part.data
        assert torch.equal(found, whole(name))
        assert len({(part.local_shape, part.axis_fragmentations) for part in mine}) == 1
        assert {part.replica_id for part in mine} == {0}


def test_a_save_in_megatrons_older_format_takes_the_place_of_one_in_the_newer(tmp_path: Path) -> None:
    """Megatron would load the newer format's, whatever is beside it."""
    folder = tmp_path / "iter_0000200"
    leave_other_format_behind(str(tmp_path), 200)
    folder.mkdir()
    for name in ("metadata.json", "mp_rank_00"):
        (folder / name).touch()
    leave_other_format_behind(str(tmp_path), 200)
    assert [path.name for path in folder.iterdir()] == ["mp_rank_00"]
