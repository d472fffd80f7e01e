# SPDX-License-Identifier: Apache-2.0
"""What was measured on a node, and what of it makes the node unfit. Pure. May import: the standard library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

LARGEST_OFFSET_S: Final = 1.0
"""Of the clock. Times of other nodes' events and records are compared with this node's."""
LEAST_FREE_SHARE: Final = 0.9
"""Of a device's memory. What an earlier job has left would be missing."""


@dataclass(frozen=True)
class Peer:
    """What one process of the loop has said. There is one for each worker that the node is to have.

    Attributes:
        device: its name; None: a worker without a device.
        free_gib, total_gib: of the device's memory, before anything was done.
        exact: whether the device's product of two matrices is the one that the CPU computes.
        loop_s: how long the loop took: a sum over all processes; None: it has not come to its end.
        error: what has gone wrong, in one line; None: nothing.
    """

    device: str | None = None
    free_gib: float = 0.0
    total_gib: float = 0.0
    exact: bool = True
    loop_s: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Folder:
    """A place for files. `error`: why none can be written; None: they can."""

    path: str
    free_gib: float
    error: str | None = None


@dataclass(frozen=True)
class Measured:
    """Of one node.

    Attributes:
        workers: that it is to have.
        devices: that this node shows; None: the workers need none.
        peers: one for each worker, unless there are too few devices.
        clock_offset_s: of this node's clock from that of the run directory's file system; None: not measured.
    """

    workers: int
    devices: int | None
    peers: tuple[Peer, ...]
    folders: tuple[Folder, ...]
    clock_offset_s: float | None = None


def problems(measured: Measured, least_free_gib: float) -> list[str]:
    """One line for each thing that makes the node unfit; nothing: it is fit.

    Args:
        least_free_gib: what each folder must have room for.
    """
    return [*_of_devices(measured), *_of_folders(measured.folders, least_free_gib), *_of_clock(measured)]


def _of_devices(measured: Measured) -> Iterator[str]:
    wanted = measured.workers
    if measured.devices is not None and measured.devices < wanted:
        yield f"{measured.devices} of {wanted} GPUs are visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        return
    for number, peer in enumerate(measured.peers):
        name = f"GPU {number}" if measured.devices is not None else f"process {number}"
        if peer.error is not None:
            yield f"{name} fails: {peer.error}"
        elif not peer.exact:
            yield f"{name} computes wrong products; have it tested, and keep jobs off it"
        if peer.free_gib < LEAST_FREE_SHARE * peer.total_gib:
            yield (
                f"{name} has {peer.free_gib:.1f} of {peer.total_gib:.1f} GiB free; end what uses it (nvidia-smi shows "
                "processes)"
            )
    silent = [str(number) for number, peer in enumerate(measured.peers) if peer.loop_s is None and peer.error is None]
    if silent:
        yield f"an all-reduce over all {wanted} workers hangs, in process {', '.join(silent)}; try with NCCL_DEBUG=INFO"


def _of_folders(folders: tuple[Folder, ...], least_free_gib: float) -> Iterator[str]:
    for folder in folders:
        if folder.error is not None:
            yield f"{folder.path} can't be written ({folder.error})"
        elif folder.free_gib < least_free_gib:
            hint = "; give the container more (--shm-size, --ipc=host)" if folder.path == "/dev/shm" else ""
            yield f"{folder.path} has {folder.free_gib:.2f} GiB free, and {least_free_gib:g} are needed{hint}"


def _of_clock(measured: Measured) -> Iterator[str]:
    offset = measured.clock_offset_s
    if offset is not None and abs(offset) > LARGEST_OFFSET_S:
        side = "ahead of" if offset > 0 else "behind"
        yield f"the clock is {abs(offset):.1f} s {side} that of the run directory's file system; fix NTP"
