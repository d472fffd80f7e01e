# SPDX-License-Identifier: Apache-2.0
"""Makes room on the device before a rebuild: real jobs use most of it, and old and new objects are there together.

A rebuild that runs out of memory costs another recovery, and ends the job if that doesn't help. So before anything is
built, the worker decides what the new objects take over of the old ones, and whether all else of the old state goes to
host memory. Each worker decides alone: where its state is meanwhile is no other worker's business. `state.room` is the
decision, here are the numbers for it and what follows. May import torch and everything of this package.
"""

from typing import Final

from megatron_resihp.integration.patches.startup import model_fields
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.footprint import bytes_of, storages
from megatron_resihp.integration.state.host_state import discard, move_to_host
from megatron_resihp.integration.state.room import Room, Way, expected_bytes, free_on_device, free_on_host, way_of
from megatron_resihp.integration.state.taking_over import Succession
from megatron_resihp.plan import OwnSplit, spelled_out
from megatron_resihp.protocol.published import EpochPlan

PLENTY: Final = 4
"""With so many times the old state free on the device, nobody asks what the new one takes."""


def make_room(runtime: Runtime, order: EpochPlan) -> Succession:
    """Decide where the old state is while new objects are built, and what they take over of it.

    Gradients are freed already. The old state stays whole: on the device, or in host memory.
    """
    live, plan = runtime.held.live, spelled_out(order.plan, runtime.job.own.chunks)
    held, wanted = order.held.get(runtime.worker, ()), plan.shards_of(runtime.worker)
    owned = storages(live)
    whole = bytes_of(live, owned)
    if not runtime.held.shards:
        discard(live)
        owned = storages(live)
    chunks = runtime.mode.state.succeeds(held, wanted)
    old, new = sum(owned.values()), 0
    free = free_on_device(runtime.job.config.resihp_memory_reserve)
    if len(chunks) < len(wanted) and free < PLENTY * whole:
        own = OwnSplit(runtime.job.own.chunks, runtime.job.own.tensor_parallel)
        new = expected_bytes(model_fields(runtime.job.args), own, plan, runtime.worker) or whole
        new += 0 if held == wanted else old  # about what it receives
    # After an attempt that ran out of memory others have taken their shares of the host's already.
    received = 0 if len(chunks) == len(wanted) else old  # about
    room = Room(new, old, free, received, free_on_host(alone=runtime.recovery.ran_out))
    if live.away or way_of(room, runtime.recovery.ran_out) is Way.THROUGH_HOST:
        move_to_host(live)
        chunks = {}
    return Succession(live, chunks, whole)
