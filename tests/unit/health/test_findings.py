# SPDX-License-Identifier: Apache-2.0
"""What makes a node unfit."""

from __future__ import annotations

import pytest

from megatron_resihp.health.findings import Folder, Measured, Peer, problems

GOOD = Peer("a GPU", free_gib=79.0, total_gib=80.0, loop_s=0.01)
CPU = Peer(loop_s=0.01)
ROOMY = Folder("/runs", 100.0)


def said(*peers: Peer, devices: int | None = 2, folders: tuple[Folder, ...] = (ROOMY,), clock: float = 0.0) -> str:
    return "\n".join(problems(Measured(2, devices, peers, folders, clock), 1.0))


def test_a_node_without_problems_is_fit() -> None:
    assert said(GOOD, GOOD) == ""
    assert said(CPU, CPU, devices=None, clock=-0.9) == ""


@pytest.mark.parametrize(
    ("peer", "problem"),
    [
        (Peer("a GPU", 79.0, 80.0, loop_s=0.1, exact=False), "GPU 1 computes wrong products"),
        (Peer("a GPU", 60.0, 80.0, loop_s=0.1), "GPU 1 has 60.0 of 80.0 GiB free; end what uses it"),
        (Peer(error="RuntimeError: CUDA error"), "GPU 1 fails: RuntimeError: CUDA error"),
        (Peer("a GPU", 79.0, 80.0), "an all-reduce over all 2 workers hangs, in process 1;"),
    ],
)
def test_a_bad_device_is_named(peer: Peer, problem: str) -> None:
    text = said(GOOD, peer)
    assert text.startswith(problem) and "\n" not in text


def test_devices_that_are_missing_are_all_that_is_said_of_devices() -> None:
    assert said(devices=1).startswith("1 of 2 GPUs are visible")


def test_workers_without_devices_are_processes() -> None:
    assert said(CPU, Peer(error="no"), devices=None) == "process 1 fails: no"


@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        (Folder("/runs", 0.5), "/runs has 0.50 GiB free, and 1 are needed"),
        (Folder("/dev/shm", 0.0625), "/dev/shm has 0.06 GiB free, and 1 are needed; give the container more"),
        (Folder("/runs", 100.0, "Read-only file system"), "/runs can't be written (Read-only file system)"),
    ],
)
def test_a_folder_without_room_is_named(folder: Folder, problem: str) -> None:
    text = said(GOOD, GOOD, folders=(ROOMY, folder))
    assert text.startswith(problem) and "\n" not in text


@pytest.mark.parametrize(("offset", "side"), [(1.5, "ahead of"), (-1.5, "behind")])
def test_a_clock_that_is_wrong_is_named(offset: float, side: str) -> None:
    assert said(GOOD, GOOD, clock=offset).startswith(f"the clock is 1.5 s {side} that of the run directory's")
