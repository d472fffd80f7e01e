# SPDX-License-Identifier: Apache-2.0
"""How a rebuild finds room: new objects beside the old ones, or after these have moved to host memory.

May import torch, `control`, `cost`, `plan` and `cpu`.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from megatron_resihp import cpu
from megatron_resihp.control import linux
from megatron_resihp.cost.model.layers import ModelError, model_from_arguments
from megatron_resihp.cost.training import TrainingError, training_of_job
from megatron_resihp.plan import OwnSplit, ParallelPlan, PlanError


class Way(StrEnum):
    """Where the old state is while the new objects are built."""

    BESIDE = "on the device"
    THROUGH_HOST = "in host memory"


@dataclass(frozen=True)
class Room:
    """What a rebuild needs and may take, in bytes.

    Attributes:
        new: of the device, for new objects and what is received for them, without what they take over.
        old: of the state that could move to the host.
        device: free on the device.
        received: of what comes from others, which stays in host memory until it is filled in.
        host: of the host's memory that this worker may take.
    """

    new: int
    old: int
    device: int
    received: int
    host: int


def way_of(room: Room, ran_out: bool) -> Way:
    """The way that fits. If none seems to, new objects are built beside the old ones: the estimate may be wrong.

    Args:
        ran_out: whether the device's memory has run out on the way to this epoch.
    """
    short = ran_out or room.new > room.device
    # Once memory has run out the other way is no better.
    needed = room.old + (0 if ran_out else room.received)
    return Way.THROUGH_HOST if short and room.old > 0 and needed <= room.host else Way.BESIDE


def free_on_device(reserve: float) -> int:
    """Bytes that can be taken: as many as anybody wants where they are not counted.

    Args:
        reserve: percent of the device that is kept for communicators and fragmentation.
    """
    if not cpu.counts_memory():
        return sys.maxsize
    free, whole = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(free + cached - whole * reserve / 100)


def free_on_host(alone: bool = False) -> int:
    """Bytes of host memory for this worker, when all workers of the node take as much, or `alone`: what is left."""
    return linux.available_memory() // (1 if alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def expected_bytes(arguments: Mapping[str, Any], own: OwnSplit, plan: ParallelPlan, worker: int) -> int | None:
    """Bytes of parameters, gradients and optimizer of a worker under a plan that says its layers; None: not known.

    Args:
        arguments: Megatron's.
        own: the job's own split into layers, and its tensor-parallel degree.
    """
    # This takes a while to import, and is wanted only where memory is short.
    from megatron_resihp.cost.memory import memory_of

    try:
        model, training = model_from_arguments(arguments), training_of_job(arguments, own)
        return memory_of(plan, model, training)[worker].state
    except (ModelError, TrainingError, PlanError, ValueError):
        return None
