# SPDX-License-Identifier: Apache-2.0
"""Cost profiles that reproduce a published fault-free throughput, by one efficiency. Imports this package's modules.

Only the fault-free column of the published table is used, so that whatever a strategy does under failures follows from
the simulation alone.
"""

from dataclasses import replace
from typing import Final

from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.simulator.sizes import Sizes

ROUNDS: Final = 20


def calibrated(sizes: Sizes, samples_per_s: float) -> Sizes:
    """The sizes with the efficiency of its devices with which the job's own layout is so fast.

    Compute takes time in proportion to 1 / efficiency, transfers don't depend on it, so that a few corrections by the
    ratio of wanted to found throughput get there.

    Raises:
        SizesError: the layout can't be run.
        ValueError: no efficiency gives that throughput: transfers alone take longer.
    """
    plan = sizes.plan()
    healthy = Health(dict.fromkeys(plan.members, 1.0))
    for _ in range(ROUNDS):
        found = evaluate(plan, healthy, sizes.cost()).samples_per_s
        if abs(found / samples_per_s - 1) < 1e-9:
            return sizes
        sizes = replace(sizes, device=replace(sizes.device, efficiency=sizes.device.efficiency * samples_per_s / found))
    if abs(found / samples_per_s - 1) < 1e-4:
        return sizes
    raise ValueError(f"no efficiency gives {samples_per_s:g} samples/s; transfers alone allow less")
