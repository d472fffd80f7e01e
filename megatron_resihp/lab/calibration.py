# SPDX-License-Identifier: Apache-2.0
"""Fits cost profiles to a published fault-free throughput, by one efficiency. Imports this package's modules.

It uses only the fault-free column of the published table, so a strategy's behaviour under failures follows from the
simulation alone.
"""

from dataclasses import replace
from typing import Final

from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.simulator.sizes import Sizes

ROUNDS: Final = 20


def calibrated(sizes: Sizes, samples_per_s: float) -> Sizes:
    """The sizes with the device efficiency at which the job's own layout has the given throughput.

    Compute time is proportional to 1 / efficiency, while transfers do not depend on it. So a few corrections by the
    ratio of wanted to found throughput suffice.

    Raises:
        SizesError: the layout cannot run.
        ValueError: no efficiency gives that throughput, as transfers alone take longer.
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
