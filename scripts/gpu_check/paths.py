# SPDX-License-Identifier: Apache-2.0
"""How fast state and gradients cross: copies, the digest, transfers, messages and sums between workers.

Imports the plugin and torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from setting import Row, Setting
from timing import fastest
from workers import run_workers

from megatron_resihp.executor.digest import digest_tensors
from megatron_resihp.executor.groups.side_group import SideGroup
from megatron_resihp.executor.groups.waiting import Waiter
from megatron_resihp.executor.slice_sums import Bucket, sum_gradients
from megatron_resihp.executor.transfer import receive_tensors, send_tensors
from megatron_resihp.plan.slices import Slice

CASES: Final = {
    "on-device": "a copy on the device", "to-host": "into pageable memory", "to-pinned": "into pinned memory",
    "from-host": "out of pageable memory", "from-pinned": "out of pinned memory", "digest": "of a state",
    "transfer": "of a state between two workers of one machine", "sum": "of gradients of two such workers",
    "message-between-devices": "of a result of an op", "sum-between-devices": "of gradients",
}  # fmt: skip
BETWEEN: Final = "-between-devices"
"""Of cases that cross as with `--resihp-carrier device`: by NCCL, in two processes."""
BYTES: Final = 1 << 30
REHEARSED_BYTES: Final = 1 << 22


def run(setting: Setting, name: str) -> Row:
    size = REHEARSED_BYTES if setting.stand_in else BYTES
    if name.endswith(BETWEEN):
        return _between(setting, name, size)
    device = torch.device("cpu") if setting.stand_in else torch.device("cuda", 0)
    state = torch.randn(size // 4, device=device)
    pinned = torch.empty_like(state, device="cpu", pin_memory=not setting.stand_in).copy_(state)
    host = state.to("cpu", copy=True)
    target = torch.empty_like(state)
    ways: dict[str, Callable[[], Any]] = {
        "on-device": lambda: target.copy_(state), "to-host": lambda: host.copy_(state),
        "to-pinned": lambda: pinned.copy_(state, non_blocking=True), "from-host": lambda: target.copy_(host),
        "from-pinned": lambda: target.copy_(pinned, non_blocking=True), "digest": lambda: digest_tensors({"w": state}),
    }  # fmt: skip
    way = ways.get(name)
    if way is None:
        return _transfer(state, device) if name == "transfer" else _sum(state)
    seconds = fastest(way, device)
    same = name == "digest" or torch.equal({"to-host": host, "to-pinned": pinned}.get(name, target), state.to(
        "cpu" if name.startswith("to-") else device))  # fmt: skip
    return {"ok": bool(same), "gb_per_s": round(size / seconds / 1e9, 2)}


def _between(setting: Setting, name: str, size: int) -> Row:
    options = {"what": name.removesuffix(BETWEEN), "bytes": size}
    rows = run_workers(setting, name, "between_worker.py", options, workers=2)
    good = all(row["code"] == 0 and row.get("right") for row in rows)
    return {"ok": good, "gb_per_s": min(row.get("gb_per_s", 0.0) for row in rows), "workers": rows}


def _transfer(state: torch.Tensor, device: torch.device) -> Row:
    """Move state as in a recovery, through host memory and gloo; here between two threads."""
    store = dist.HashStore()
    received: dict[str, torch.Tensor] = {}
    start = time.monotonic()

    def give() -> None:
        group = SideGroup(store, "paths", (0, 1), 0, Waiter(lambda: False))
        send_tensors(group, 1, {"w": state}, {})

    giver = threading.Thread(target=give)
    giver.start()
    group = SideGroup(store, "paths", (0, 1), 1, Waiter(lambda: False))
    received.update(receive_tensors(group, 0, device)[0])
    giver.join()
    seconds = time.monotonic() - start
    same = digest_tensors(received) == digest_tensors({"w": state})
    return {"ok": same, "gb_per_s": round(state.nbytes / seconds / 1e9, 2)}


def _sum(state: torch.Tensor) -> Row:
    """Sum gradients as unlike replicas do by default, through host memory and gloo; here in two threads."""
    store, piece = dist.HashStore(), Slice(0, 0)
    gradients = [state.clone(), state.clone()]

    def add(worker: int) -> None:
        group = SideGroup(store, "sums", (0, 1), worker, Waiter(lambda: False))
        sum_gradients([Bucket((piece,), group)], {piece: [("w", gradients[worker])]}, {piece})

    start = time.monotonic()
    other = threading.Thread(target=add, args=(1,))
    other.start()
    add(0)
    other.join()
    same = all(torch.equal(each, 2 * state) for each in gradients)
    return {"ok": same, "gb_per_s": round(state.nbytes / (time.monotonic() - start) / 1e9, 2)}
