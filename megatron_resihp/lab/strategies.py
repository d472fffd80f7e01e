# SPDX-License-Identifier: Apache-2.0
"""Baselines that plan jobs whose replicas share experts or sequences, by name. Imports `planner` and `baselines`."""

from collections.abc import Mapping
from typing import Final

from megatron_resihp.lab.baselines.lazarus import DISPATCHED, lazarus
from megatron_resihp.lab.baselines.rectangles import rectangles
from megatron_resihp.planner.strategies.registry import STRATEGIES, Change, Entry, ReactsTo

FOR_SHARERS: Final[Mapping[str, Entry]] = {
    "restart": STRATEGIES["restart"],
    "rectangles": Entry(
        rectangles,
        "leaves out each group of replicas that share if it lost a worker; the others do its work",
        Change.IN_PLACE,
        ReactsTo.DEAD,
    ),
    "lazarus": Entry(
        lazarus,
        "places experts anew on all survivors, popular ones more often, and rare ones together",
        Change.IN_PLACE,
        ReactsTo.DEAD,
        DISPATCHED,
    ),
}
