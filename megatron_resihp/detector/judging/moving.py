# SPDX-License-Identifier: Apache-2.0
"""What stays known of devices from one epoch to the next, where units change. Imports numpy and this package.

A worker that was named within a tensor-parallel group stays slow when the plan breaks that group up. So it leaves the
group as a unit of its own: it may come back as one, or makes the next group that it works in slow, or stands by.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.judging.tracker import Tracker
from megatron_resihp.detector.judging.unit_levels import JOB, Known
from megatron_resihp.detector.judging.units import Members

Named = dict[Members, dict[int, float]]
"""By the members of a group in which somebody is slow, the culprits and their speeds p."""
Idle = dict[Members, Known]
"""What is known of units without work, those that had some last at the end."""
EPOCHS: Final = 8
"""So many epochs' healthy units are remembered. Who comes back later is compared with its peers, like a new one."""
FEW: Final = 32
"""Units of an epoch that count at least, so that small jobs, and epochs without links, forget nothing for want of
room."""


def own_levels(
    workers: Sequence[int], units: Sequence[Members], tracker: Tracker, named: Named, idle: Idle
) -> NDArray[np.float64]:
    """[workers] log of each device's own present level relative to the prediction, slowness included.

    NaN for new devices, and for those of a slow group without a known culprit.
    """
    found: dict[int, float] = {}
    # What was known of a worker alone is newer than what was known of its groups, and its present unit is the newest.
    earlier = sorted(idle.items(), key=lambda each: -len(each[0]))
    for members, known in (*earlier, *zip(units, tracker.levels.known(), strict=True)):
        healthy = known.level + float(known.offset[JOB])
        if len(members) == 1 or not known.slow:
            found |= dict.fromkeys(members, healthy + known.excess)
        else:
            culprits = named.get(members, {})
            found |= dict.fromkeys(members, healthy if culprits else float("nan"))
            found |= {worker: healthy + excess_of(worker, culprits, known.excess) for worker in culprits}
    return np.array([found.get(worker, float("nan")) for worker in workers])


def excess_of(worker: int, culprits: Mapping[int, float], excess: float) -> float:
    """How slow a culprit is: as slow as its group, if it is the only one."""
    return excess if len(culprits) == 1 else -log(culprits[worker])


def healthy_link_levels(
    links: Sequence[Members], before: Sequence[Members], tracker: Tracker, idle: Idle
) -> NDArray[np.float64]:
    """[links] log of each link's present level relative to the prediction; NaN for links that are slow or new."""
    known = idle | dict(zip(before, tracker.levels.known(), strict=True))
    healthy = {ends: each for ends, each in known.items() if not each.slow}
    found = {ends: each.level + float(each.offset[JOB]) + each.excess for ends, each in healthy.items()}
    return np.array([found.get(ends, float("nan")) for ends in links])


def sources(
    before: Sequence[Members], now: Sequence[Members], tracker: Tracker, idle: Idle
) -> tuple[NDArray[np.int64], dict[int, Known]]:
    """For `Tracker.move`: each unit's earlier number, and what is known of units that had no work.

    What is known of units that have no work now goes to `idle`. Each plan may have other groups and links, and dead
    workers never come back. So of healthy ones only the latest stay there.
    """
    returning = {place: idle.pop(members) for place, members in enumerate(now) if members in idle}
    present = set(now)
    known = zip(before, tracker.levels.known(), strict=True)
    idle |= {members: levels for members, levels in known if members not in present}
    healthy = [members for members, levels in idle.items() if not levels.slow]
    for members in healthy[: max(len(healthy) - EPOCHS * max(len(before), len(now), FEW), 0)]:
        del idle[members]
    return places(before, now), returning


def places[T: Hashable](before: Sequence[T], now: Sequence[T]) -> NDArray[np.int64]:
    """[now] the number that each had before, or -1 if it is new."""
    number = {each: place for place, each in enumerate(before)}
    return np.array([number.get(each, -1) for each in now], dtype=np.int64)


def regroup(now: Sequence[Members], returning: dict[int, Known], named: Named, idle: Idle) -> None:
    """Let culprits leave the groups that have no work now, and join those that they work in; changes all but `now`."""
    for members in [each for each in named if each in idle]:
        group, culprits = idle[members], named.pop(members)
        idle[members] = replace(group, slow=False, excess=0.0)
        for worker in culprits:
            idle[worker,] = replace(group, excess=excess_of(worker, culprits, group.excess))
    suspects = {worker for (worker, *others), known in idle.items() if known.slow and not others}
    for place, members in enumerate(now):
        if workers := sorted(suspects.intersection(members)):
            known = [idle.pop((worker,)) for worker in workers]
            slowest = max(known, key=lambda each: each.excess)
            returning[place] = replace(returning.get(place, slowest), slow=True, excess=slowest.excess,
                                       began=slowest.began)  # fmt: skip
            named[members] = {worker: exp(-each.excess) for worker, each in zip(workers, known, strict=True)}
