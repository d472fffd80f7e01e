# SPDX-License-Identifier: Apache-2.0
"""One process of `groups.py`. Its argument is a JSON object; it writes what it found to a file, for two epochs.

Imports the plugin, Megatron, torch and the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from megatron_resihp import cpu
from megatron_resihp.executor.groups.communicators import Communicators

TIMEOUT: Final = timedelta(seconds=50)
EPOCHS: Final = 2
"""The second epoch shows the cost in a recovery."""


def main(options: dict[str, Any]) -> None:
    cuda = options["backend"] == "nccl"
    if not cuda:
        cpu.install(force=True)
    from megatron.core import parallel_state

    torch.cuda.set_device(0)
    torch.ones(1, device="cuda").item()
    store = dist.FileStore(options["meeting"], -1)
    communicators = Communicators(store, options["rank"], lambda: False)
    found: dict[str, Any] = {"rank": options["rank"], "sums": True}
    for epoch in range(EPOCHS):
        free = torch.cuda.mem_get_info()[0]
        start = time.monotonic()
        communicators.begin(epoch, "check")
        communicators.join_world(options["backend"], tuple(range(options["workers"])), TIMEOUT)
        parallel_state.initialize_model_parallel(options["degree"])
        registered = time.monotonic()
        groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
        for group in groups:
            numbers = torch.ones(1, device="cuda")
            dist.all_reduce(numbers, group=group)
            found["sums"] &= int(numbers) == group.size()
        found[f"epoch{epoch}"] = {
            "groups_s": round(registered - start, 2), "communicators_s": round(time.monotonic() - registered, 2),
            "groups": len(dist.distributed_c10d._world.pg_map), "communicators": len(groups),
            "taken_mib": (free - torch.cuda.mem_get_info()[0]) >> 20 if cuda else 0,
        }  # fmt: skip
        communicators.connections.abort()
        parallel_state.destroy_model_parallel()
        communicators.destroy()
        del groups, group
        communicators.release()
    Path(options["result"]).write_text(json.dumps(found))
    os._exit(0)  # no need to wait for threads that still free groups


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
