# SPDX-License-Identifier: Apache-2.0
"""One of two processes of `paths.py` that send each other results, and sum gradients, between their devices.

Its argument is a JSON object; it writes what it found to a file. Imports the plugin's executor and torch.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from timing import CALLS, fastest

from megatron_resihp.executor.direct.order import SliceSum
from megatron_resihp.executor.direct.peers import GlooPeers, NcclPeers, Peers
from megatron_resihp.executor.direct.sums import sum_between_devices
from megatron_resihp.executor.groups.waiting import Waiter
from megatron_resihp.plan.slices import Slice

BOTH: Final = (0, 1)
TIMEOUT: Final = timedelta(seconds=50)
PIECE: Final = Slice(0, 0)


def main(options: dict[str, Any]) -> None:
    rank: int = options["rank"]
    cuda = options["backend"] == "nccl"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    store = dist.FileStore(options["meeting"], len(BOTH))
    peers: Peers
    if cuda:
        torch.cuda.set_device(0)
        peers = NcclPeers(store, BOTH, rank, TIMEOUT)
    else:
        peers = GlooPeers(store, "peers", BOTH, rank, Waiter(lambda: False))
    peers.connect()
    state = torch.full((options["bytes"] // 4,), float(rank + 1), device=device)
    measured = (_message if options["what"] == "message" else _sum)(state, peers, rank)
    Path(options["result"]).write_text(json.dumps(measured))
    os._exit(0)  # no need to wait for threads that still free groups


def _message(state: torch.Tensor, peers: Peers, rank: int) -> dict[str, Any]:
    """Worker 0 sends, and worker 1 receives."""
    received = peers.room(state.shape, state.dtype)

    def cross() -> None:
        sends, receives = ([(state, 1)], []) if rank == 0 else ([], [(received, 0)])
        peers.exchange(sends, receives).wait()

    seconds = fastest(cross, state.device)
    right = rank == 0 or bool((received == 1.0).all())
    return {"right": right, "gb_per_s": round(state.nbytes / seconds / 1e9, 2)}


def _sum(state: torch.Tensor, peers: Peers, rank: int) -> dict[str, Any]:
    """Both contribute, and both get the sum."""
    of = [SliceSum((PIECE,), BOTH, BOTH)]
    seconds = fastest(lambda: sum_between_devices(of, {PIECE: [("w", state)]}, {PIECE}, peers, rank), state.device)
    # 1 and 2 become 3 in the first call, and twice as much in each later one.
    right = bool((state == 3.0 * 2.0 ** (CALLS - 1)).all())
    return {"right": right, "gb_per_s": round(state.nbytes / seconds / 1e9, 2)}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
