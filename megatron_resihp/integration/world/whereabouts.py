# SPDX-License-Identifier: Apache-2.0
"""Where a worker runs: its machine, and which of the machine's GPUs it has. May import torch, `control` and `cpu`."""

import os
import socket
from typing import Any

import torch

from megatron_resihp import cpu
from megatron_resihp.control.node import environment


def whereabouts(local_rank: int) -> dict[str, Any]:
    """The fields of the event `worker_started`; what can't be found out is left out, as it is for people only."""
    return {
        "host": socket.gethostname(), "node": int(os.environ[environment.NODE]), "local_rank": local_rank,
        "pid": os.getpid(), **({} if cpu.installed() else _device(local_rank)),
    }  # fmt: skip


def _device(number: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    uuid = getattr(properties, "uuid", None)
    found: dict[str, Any] = {"gpu_name": properties.name, "gpu": index_of(number, os.environ, uuid and f"GPU-{uuid}")}
    return found if uuid is None else {**found, "gpu_uuid": f"GPU-{uuid}"}


def index_of(number: int, variables: Any, uuid: str | None) -> int | None:
    """The index on the machine, as `nvidia-smi` counts, of the device that CUDA numbers so; None: not known.

    Args:
        variables: of the environment.
    """
    by_driver = _index_by_driver(uuid) if uuid is not None else None
    if by_driver is not None:
        return by_driver
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return number
    given = [each.strip() for each in visible.split(",")]
    return int(given[number]) if number < len(given) and given[number].isdecimal() else None


def _index_by_driver(uuid: str) -> int | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)))
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # not installed, or the driver does not answer: the environment has to do
        return None
