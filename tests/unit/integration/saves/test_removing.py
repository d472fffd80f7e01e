# SPDX-License-Identifier: Apache-2.0
"""Megatron's removal of older non-persistent checkpoints leaves the last whole one, whatever is newer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.training.checkpointing import cleanup_old_non_persistent_checkpoint

from megatron_resihp.control.worker.saved_state import TRACKER
from megatron_resihp.integration.saves.removing import wrap_cleanup


@pytest.fixture(autouse=True)
def first_rank() -> Iterator[None]:
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


def left(path: Path, iterations: list[int], tracker: str | None) -> list[int]:
    """What is there once Megatron has made room for the next one."""
    for iteration in iterations:
        (path / f"iter_{iteration:07d}").mkdir()
    if tracker is not None:
        (path / TRACKER).write_text(tracker)
    wrap_cleanup(cleanup_old_non_persistent_checkpoint)(str(path), leave_ckpt_num=1)
    return sorted(int(each.name.removeprefix("iter_")) for each in path.glob("iter_*"))


@pytest.mark.parametrize(
    ("iterations", "tracker", "expected"),
    [
        ([2, 4], "4", [4]),
        ([2, 4, 6], "4", [4, 6]),
        ([2, 4, 6], "6\n", [6]),
        ([4, 90, 100], "4", [4, 90, 100]),
        ([2, 4], "", [2, 4]),
        ([2], None, [2]),
        ([], None, []),
    ],
    ids=[
        "as in Megatron",
        "a save was cut short",
        "it was made again",
        "an older one was gone on from",
        "an empty tracker",
        "the first one was cut short",
        "none",
    ],
)
def test_the_last_whole_one_stays(
    tmp_path: Path, iterations: list[int], tracker: str | None, expected: list[int]
) -> None:
    assert left(tmp_path, iterations, tracker) == expected
