# SPDX-License-Identifier: Apache-2.0
"""The proven optimum of one replica of small instances: the order of its groups, and the layers of each.

All orders and layers are tried, stage by stage, but for those that bounds say can't be better than what is known.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from megatron_resihp.cost.job import JobCost
from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.planner.search.makespan import pipeline_makespan
from megatron_resihp.planner.search.tables import tables_of

Group = tuple[int, float]
"""Degree and speed of the slowest member."""
Bag = tuple[tuple[Group, int], ...]
"""Groups and how many there are of each, sorted."""
_PRECISION = 1e-9


class _Arrays(NamedTuple):
    """Rows are degrees.

    Attributes:
        forward, backward, state, kept, working: of each layer, [degrees + 1, layers].
        transfer: [degrees + 1, degrees + 1].
        needed: share of a model's work in the layers from each one on, at least, [layers + 1].
        memory: bytes.
        forward_share: of a stage's time, at most.
    """

    forward: np.ndarray
    backward: np.ndarray
    state: np.ndarray
    kept: np.ndarray
    working: np.ndarray
    transfer: np.ndarray
    needed: np.ndarray
    memory: float
    forward_share: float


class Costs:
    """What groups and replicas of them can do."""

    def __init__(self, arrays: _Arrays, rate: np.ndarray) -> None:
        self._arrays = arrays
        self._rate = rate

    @classmethod
    def of(cls, cost: JobCost) -> "Costs":
        tables = tables_of(cost, True)
        total = tables.forward + tables.backward
        degrees = list(cost.degrees)
        least = (total[degrees] * tables.rate[degrees, np.newaxis]).min(axis=0)
        needed = np.append(least[::-1].cumsum()[::-1], 0.0)
        shares = np.divide(tables.forward, total, out=np.zeros_like(total), where=np.isfinite(total) & (total > 0))
        arrays = _Arrays(
            tables.forward, tables.backward, tables.held + tables.shared, tables.kept, tables.working,
            tables.transfer, needed / needed[0], tables.memory, float(shares.max()),
        )  # fmt: skip
        return cls(arrays, tables.rate / needed[0])

    @cache  # noqa: B019
    def power(self, group: Group) -> float:
        """Models per second, at most."""
        degree, speed = group
        return float(self._rate[degree]) * speed

    def bound(self, bag: Bag, micro_batches: int) -> float:
        """Seconds that a replica takes at least, infinite if memory is too small; see `_rest_bound`."""
        powers, counts = self._by_power(bag)[2:]
        longest = self._longest(bag)
        if longest == np.inf:
            return np.inf
        both = _rest_bound(powers, counts, counts.sum(), micro_batches, self._arrays.forward_share, longest)
        return max(float(both), micro_batches * longest)

    @cache  # noqa: B019
    def _longest(self, bag: Bag) -> float:
        """Seconds of a micro-batch in the slowest stage of a replica of these groups, at least: layers are whole."""
        degrees, speeds, powers, counts = self._by_power(bag)
        if not _have_room(self._arrays, degrees, speeds, counts, 0, np.inf):
            return np.inf
        whole = (self._arrays.forward + self._arrays.backward)[degrees].sum(axis=1) / speeds
        low, high = 1 / float(powers @ counts), float(whole.max())
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            if _have_room(self._arrays, degrees, speeds, counts, 0, middle):
                high = middle
            else:
                low = middle
        return low

    def least(self, bag: Bag, micro_batches: int, below: float, left: np.ndarray) -> float:
        """The least makespan of a replica of all these groups, infinite if there is none below that.

        Args:
            bag, micro_batches: of the replica.
            below: seconds.
            left: trials, counted down; when they are spent, the result is none.
        """
        degrees, speeds, powers, counts = self._by_power(bag)
        stages = int(counts.sum())
        rows = np.zeros((6, stages + 1))
        chosen = np.zeros(stages, np.int64)
        found = _extend(
            self._arrays, degrees, speeds, powers, counts.copy(), stages, micro_batches, 0, 0, 0.0, rows, chosen,
            below, left,
        )  # fmt: skip
        return found if found < below else np.inf

    def _by_power(self, bag: Bag) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Degrees, speeds, powers and counts, the most powerful first."""
        ordered = sorted(bag, key=lambda item: -self.power(item[0]))
        return (
            np.array([group[0] for group, _ in ordered]),
            np.array([group[1] for group, _ in ordered]),
            np.array([self.power(group) for group, _ in ordered]),
            np.array([count for _, count in ordered]),
        )


@compiled
def _rest_bound(powers, counts, stages, micro_batches, forward_share, longest):  # type: ignore[no-untyped-def]
    """Seconds for one model's work in the last stages of a pipeline, the slowest of which takes that long at least.

    Stage s with F of share φ of its time t can't begin its first B before its first F has been to the end and back,
    and runs at most w = S − 1 − s other F meanwhile; so an iteration lasts Σ t + (m − 1 − w φ) t of any stage at least.
    Σ t is least for a given longest t if the most powerful groups take that long; between such points both are linear.
    """
    weight = max(micro_batches - 1 - (stages - 1) * forward_share, 0.0)
    least, number, power = np.inf, 0, 0.0
    for kind in range(len(powers)):
        if counts[kind] > 0:
            if number == 0:
                least = (1 + weight) * max(1 / powers[kind], longest)
            if (power + counts[kind] * powers[kind]) * longest >= 1:
                return min(least, (number + weight) * longest + (1 - power * longest) / powers[kind])
            number += counts[kind]
            power += counts[kind] * powers[kind]
            least = min(least, (number + weight) / power)
    return least


@compiled
def _have_room(arrays, degrees, speeds, counts, first, longest):  # type: ignore[no-untyped-def]
    """Whether groups may find room for the layers from one on: each for as many as fit its memory and so many seconds.

    A group may take the layers that come next to each other of which it can take most, whether or not another does.
    """
    wanted = arrays.forward.shape[1] - first
    for kind in range(len(counts)):
        if counts[kind] > 0:
            wanted -= counts[kind] * _most_layers(arrays, degrees[kind], longest * speeds[kind], first)
            if wanted <= 0:
                return True
    return wanted <= 0


@compiled
def _most_layers(arrays, degree, longest, first):  # type: ignore[no-untyped-def]
    """Layers one after another that fit a group's memory with one micro-batch in flight, and so many seconds."""
    layers = arrays.forward.shape[1]
    most = 0
    for start in range(first, layers):
        seconds = memory = working = 0.0
        for layer in range(start, layers):
            seconds += arrays.forward[degree, layer] + arrays.backward[degree, layer]
            memory += arrays.state[degree, layer] + arrays.kept[degree, layer]
            working = max(working, arrays.working[degree, layer])
            if memory + working > arrays.memory or seconds > longest * (1 + _PRECISION):
                break
            most = max(most, layer + 1 - start)
        if most == layers - start:
            break
    return most


@compiled
def _extend(  # type: ignore[no-untyped-def]
    arrays, degrees, speeds, powers, counts, stages, micro_batches, stage, first, before, rows, chosen, best, left
):
    """The least makespan below `best` with the stages before this one as they are; `best` if there is none.

    Args:
        arrays, degrees, speeds, powers: what is given.
        counts: groups that are left.
        stages, micro_batches: of the replica.
        stage, first: the stage to fill, and its first layer.
        before: seconds of one micro-batch in the stages before.
        rows: F, B, transfer, two rows of scratch, and W (zeros), [6, stages + 1].
        chosen: kind of each stage's group.
        best: seconds.
        left: trials, counted down.
    """
    left[0] -= 1
    if left[0] <= 0:
        return best
    layers = arrays.forward.shape[1]
    forward, backward, transfer = rows[0], rows[1], rows[2]
    last = stage == stages - 1
    for kind in range(len(counts)):
        if counts[kind] == 0:
            continue
        counts[kind] -= 1
        chosen[stage] = kind
        k = degrees[kind]
        forward[stage] = backward[stage] = memory = working = 0.0
        if stage > 0:
            transfer[stage - 1] = arrays.transfer[degrees[chosen[stage - 1]], k]
        in_flight = min(stages - stage, micro_batches)
        for end in range(first, layers + 1):
            if end > first:
                forward[stage] += arrays.forward[k, end - 1] / speeds[kind]
                backward[stage] += arrays.backward[k, end - 1] / speeds[kind]
                memory += arrays.state[k, end - 1] + arrays.kept[k, end - 1] * in_flight
                working = max(working, arrays.working[k, end - 1])
            own = forward[stage] + backward[stage]
            if memory + working > arrays.memory or before + micro_batches * own >= best:
                break
            if last:
                if end == layers:
                    seconds = pipeline_makespan(
                        forward, backward, rows[5], transfer, stages, micro_batches, rows[3], rows[4]
                    )
                    best = min(best, seconds)
            elif _may_be_better(
                arrays, degrees, speeds, powers, counts, stages, micro_batches, stage, end, before + own, rows, best
            ):
                best = _extend(
                    arrays, degrees, speeds, powers, counts, stages, micro_batches, stage + 1, end, before + own,
                    rows, chosen, best, left,
                )  # fmt: skip
        counts[kind] += 1
    return best


@compiled
def _may_be_better(  # type: ignore[no-untyped-def]
    arrays, degrees, speeds, powers, counts, stages, micro_batches, stage, end, before, rows, best
):
    """Whether some way to fill the stages after this one may be below `best`, by bounds."""
    needed = arrays.needed[end]
    most = 0.0
    for kind in range(len(counts)):
        if counts[kind] > 0:
            most = max(most, powers[kind])
    rest = stages - stage - 1
    if before + needed * _rest_bound(powers, counts, rest, micro_batches, arrays.forward_share, 0.0) >= best:
        return False
    if not _have_room(arrays, degrees, speeds, counts, end, (best - before) / micro_batches):
        return False
    # Of each stage: what comes before it, its own work, and its waits at both ends of the iteration.
    beyond = needed / most
    for other in range(stage, -1, -1):
        forward, backward, ahead = rows[0, other], rows[1, other], stages - 1 - other
        before -= forward + backward
        first_wait, last_wait = max(0.0, beyond - ahead * forward), max(0.0, beyond - ahead * backward)
        waits = first_wait + last_wait if micro_batches - 1 > ahead else max(first_wait, last_wait)
        if before + micro_batches * (forward + backward) + waits >= best:
            return False
        beyond += forward + backward
    return True
