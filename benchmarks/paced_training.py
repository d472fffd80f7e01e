# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py, which pauses after a number of iterations until told to continue. Run by healthy.py.

    PACE=SOCKET DEVICE_S=SECONDS … paced_training.py MEGATRON'S FLAGS

Each worker connects to SOCKET. After its first iteration, and whenever it has done as many as it was told, it sends the
time as a line and waits for a line with the next number. That is done at the end of an iteration, inside of the plugin
if there is one: it has finished its record of this iteration by then and not begun the next.

In each micro-batch the host waits for DEVICE_S seconds, as for a device that computes meanwhile.
"""

import functools
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any

import megatron_resihp

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "pretrain_gpt.py"


class Pace:
    """This worker's end."""

    def __init__(self, path: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._stream = connection.makefile("rw")
        self._left = 1

    def iteration_ended(self) -> None:
        self._left -= 1
        if self._left:
            return
        self._stream.write(f"{time.monotonic()}\n")
        self._stream.flush()
        self._left = int(self._stream.readline())


def main() -> None:
    megatron_resihp.enable()  # before megatron is imported, as the script does
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training import training

    device_s, compute = float(os.environ["DEVICE_S"]), GPTModel.forward

    @functools.wraps(compute)
    def forward(*positional: Any, **options: Any) -> Any:
        time.sleep(device_s)
        return compute(*positional, **options)

    GPTModel.forward = forward

    pace, original = Pace(os.environ["PACE"]), training.checkpoint_and_decide_exit

    @functools.wraps(original)
    def checkpoint_and_decide_exit(*positional: Any, **options: Any) -> bool:
        ends = bool(original(*positional, **options))
        pace.iteration_ended()
        return ends

    training.checkpoint_and_decide_exit = checkpoint_and_decide_exit
    sys.path[0] = str(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
