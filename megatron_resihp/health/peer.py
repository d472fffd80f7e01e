# SPDX-License-Identifier: Apache-2.0
"""One process of the loop: tries its device, and sums over all processes. Prints what it found as JSON, a line a step.

Runs as a program of its own, since a device that hangs takes its process along. May import: the standard library, torch
and this package's findings.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Final

from megatron_resihp.health.findings import Peer

GIB: Final = 1 << 30
WIDTH: Final = 1024
"""Of the matrices. Their numbers are small integers, so that products are exact in any order of sums."""
SUMMED: Final = 4 << 20
"""Numbers that the loop sums."""
SUMS: Final = 3


def main(argv: list[str] | None = None) -> int:
    """Do it; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--meet", required=True, help="a file that is not there yet")
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--without-device", action="store_true")
    options = parser.parse_args(argv)
    found = Peer()
    try:
        found = Peer() if options.without_device else _try_device(options.number)
        _tell(found)
        _tell(replace(found, loop_s=_loop(options)))
    except Exception as error:
        first, *_ = (str(error).strip() or "it says nothing").splitlines()
        _tell(replace(found, error=f"{type(error).__name__}: {first}"))
        return 1
    return 0


def _tell(peer: Peer) -> None:
    print(json.dumps(asdict(peer)), flush=True)


def _try_device(number: int) -> Peer:
    import torch

    torch.cuda.set_device(number)
    free, total = torch.cuda.mem_get_info(number)
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator().manual_seed(number)
    left, right = (torch.randint(-8, 9, (WIDTH, WIDTH), generator=generator).float() for _ in range(2))
    product = (left.cuda() @ right.cuda()).cpu()
    exact = bool(torch.equal(product, left @ right))
    return Peer(torch.cuda.get_device_name(number), free / GIB, total / GIB, exact)


def _loop(options: argparse.Namespace) -> float:
    """Seconds of one sum over all processes, without the time to connect.

    Raises:
        RuntimeError: it can't be made in time, or is wrong.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cpu" if options.without_device else f"cuda:{options.number}")
    dist.init_process_group(
        "gloo" if options.without_device else "nccl",
        init_method=f"file://{options.meet}",
        rank=options.number,
        world_size=options.peers,
        timeout=timedelta(seconds=options.limit_s),
    )
    took_s = 0.0
    for _ in range(SUMS):
        summed = torch.full((SUMMED,), float(options.number + 1), device=device)
        begun = time.monotonic()
        dist.all_reduce(summed)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took_s = time.monotonic() - begun
        if not bool((summed == options.peers * (options.peers + 1) / 2).all()):
            raise RuntimeError("a sum over all workers is wrong")
    dist.destroy_process_group()
    return took_s


if __name__ == "__main__":
    sys.exit(main())
