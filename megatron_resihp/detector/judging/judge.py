# SPDX-License-Identifier: Apache-2.0
"""Judges the iterations of successive epochs: residuals, trackers, and the verdicts that follow from them.

Only a worker's own compute counts, so a worker that waits for a slow peer is not slow itself. Where waits inside a
tensor-parallel group were never timed, all its members look alike. The group is then judged as one, and stays a
suspicion until validation names the culprit. Imports numpy and this package.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.input.observations import IterationObservations, Layout, with_chunks
from megatron_resihp.detector.judging.bursts import Bursts
from megatron_resihp.detector.judging.common_mode import Places
from megatron_resihp.detector.judging.expected import Expected, hidden_ops, stopped
from megatron_resihp.detector.judging.learned import Learned, UnitsNoise
from megatron_resihp.detector.judging.levels import healthy_levels, new_levels
from megatron_resihp.detector.judging.moving import (
    Idle,
    Named,
    healthy_link_levels,
    own_levels,
    places,
    regroup,
    sources,
)
from megatron_resihp.detector.judging.recent import moved
from megatron_resihp.detector.judging.tracker import Finding, Tracker
from megatron_resihp.detector.judging.unit_levels import Known
from megatron_resihp.detector.judging.units import Members, Units, alike_links, has_peers
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.validation import Suspicion
from megatron_resihp.detector.verdict import Change, Kind, Verdict

CONFIDENCE: Final = 1.96
"""Standard errors on both sides of an estimate that contain the truth with 95 % probability."""


class Judge:
    """Knowledge of the devices, and the judgement of each iteration.

    Attributes:
        expected: predicts ops and transfers.
        workers, links: the trackers of their levels.
    """

    def __init__(
        self,
        layout: Layout,
        warm_up: Sequence[IterationObservations],
        false_alarms: float,
        iterations: int,
        settings: Settings,
        known: Learned | None = None,
    ) -> None:
        """Learn from warm-up, or learn what is unknown from a few iterations; arguments as in `Monitor`."""
        self._layout, self._settings = layout, settings
        self._budget = false_alarms, iterations
        shared = has_peers(layout)
        costs = known.model if known else None
        self.expected = Expected(layout, warm_up, shared, costs, settings.peer_slowdown)
        self._units = Units(layout, shared & ~self.expected.hidden.any(axis=(1, 2)))
        numbers = np.array([each.iteration for each in warm_up])
        self._bursts, self._link_bursts = Bursts(layout.workers.size), Bursts(len(layout.links))
        self._share_among((self._bursts, self._link_bursts))
        of_workers = self._histories(warm_up)
        level, slow = healthy_levels(of_workers, self._units.stage, settings.peer_slowdown)
        smallest = settings.smallest_slowdown
        noise = known.workers.of(self._units.members) if known else None
        self.workers = Tracker(self._units.places, of_workers, numbers, smallest, level, slow, noise)
        history = self._link_histories(warm_up)
        level, slow = healthy_levels(history, alike_links(layout), settings.peer_slowdown)
        noise = known.links.of(_pairs(layout)) if known else None
        self.links = Tracker(Places(_sender_node(layout)), history, numbers, smallest, level, slow, noise)
        self._share_among((self.workers, self.links))
        if known is None:
            # Without peers, only its own rows tell what is healthy, and warm-up rows may be slow.
            alone = np.bincount(self._units.stage)[self._units.stage] == 1
            self.workers.follow_alone(alone, of_workers, numbers)
        self._suspicions: dict[Members, Suspicion] = {}
        self._named: Named = {}
        self._idle_workers: Idle = {}
        self._idle_links: Idle = {}
        self._link_size = _usual_size(warm_up)

    def _share_among(self, judges: Iterable[Bursts | Tracker]) -> None:
        """Share the job's budget of false alarms among all units."""
        units = len(self._units) + len(self._layout.links)
        for each in judges:
            each.budget(*self._budget, units)

    def first_verdicts(self, observations: IterationObservations) -> list[Verdict]:
        """Verdicts for units that were slow from the start; `observations` are the last of warm-up."""
        slow_workers, slow_links = (each.found_slow(each.levels.slow) for each in (self.workers, self.links))
        return self._verdicts(slow_workers, slow_links, observations)

    def moved(self, layout: Layout, settling: Sequence[IterationObservations]) -> list[Verdict]:
        """Switch to another epoch's layout, after its first iterations; returns verdicts for new units slow from the
        start.

        Costs are learned again. What is known of devices and links stays, also for those that have no work now.
        """
        shared = has_peers(layout)
        units, links = self._units.members, _pairs(self._layout)
        known, workers = self.workers.levels, places(self._layout.workers.tolist(), layout.workers.tolist())
        slow = moved(self._units.spread(np.where(known.slow, known.excess, 0.0)), workers)
        self._bursts.move(workers)
        self._link_bursts.move(places(links, _pairs(layout)))
        self._layout = layout
        self._units = Units(layout, shared & ~hidden_ops(settling, shared).any(axis=(1, 2)))
        level = own_levels(layout.workers.tolist(), units, self.workers, self._named, self._idle_workers)
        of_links = healthy_link_levels(_pairs(layout), links, self.links, self._idle_links)
        # Costs are those of most ops, and bursts are in few. The level of a unit not known to be slow leaves them out.
        usual = self._units.spread(self._units.slowest(level)) - np.clip(self._bursts.told, 0.0, slow)
        self.expected.move(layout, settling, usual, shared, of_links)
        numbers = np.array([each.iteration for each in settling])

        self._share_among((self._bursts, self._link_bursts))
        history = self._histories(settling)
        source, returning = sources(units, self._units.members, self.workers, self._idle_workers)
        regroup(self._units.members, returning, self._named, self._idle_workers)
        new, healthy = source < 0, (source >= 0) & ~self.workers.levels.slow[source]
        new[list(returning)] = False
        healthy[[unit for unit, known in returning.items() if not known.slow]] = True
        levels = new_levels(history, self._units.stage, self._settings.peer_slowdown, new, healthy)
        slow_workers = self.workers.move(source, returning, self._units.places, history, numbers, *levels)

        history = self._link_histories(settling)
        source, returning = sources(links, _pairs(layout), self.links, self._idle_links)
        levels = healthy_levels(history, alike_links(layout), self._settings.peer_slowdown)
        slow_links = self.links.move(source, returning, Places(_sender_node(layout)), history, numbers, *levels)

        self._share_among((self.workers, self.links))
        for each in (self._bursts, self._link_bursts):
            each.forget_untold()  # known units have no residuals of these iterations
        self._link_size = _usual_size(settling)
        return self._verdicts(slow_workers, slow_links, settling[-1])

    def judge(self, observations: IterationObservations, left_out: NDArray[np.bool_]) -> list[Verdict]:
        """Verdicts after one iteration.

        Args:
            observations: of the iteration.
            left_out: [workers] whose measurements tell nothing about their device.
        """
        observations = with_chunks(observations, self.expected.hidden.shape[2])
        of_workers = np.where(left_out, np.nan, self.expected.workers(observations))
        residuals = self._bursts.residuals(*of_workers, stopped=stopped(observations))
        untold = np.stack([self._units.average(row) for row in self._bursts.untold])
        found = self.workers.update(self._units.average(residuals), observations.iteration, untold)
        self._bursts.begin(self._units.spread(_in_bursts(found, len(self._units))))
        found_links = []
        if len(self._layout.links):
            residuals = self._link_bursts.residuals(*self.expected.links(observations))
            found_links = self.links.update(residuals, observations.iteration, self._link_bursts.untold)
            self._link_bursts.begin(_in_bursts(found_links, residuals.size))
        every = self._settings.learn_every
        if observations.iteration % every == 0:
            suspect = self._units.spread(self.workers.suspect() | self._faster_than_stage()) | left_out
            self.expected.learn(observations, self._units.spread(self.workers.levels.healthy()), suspect, every)
        return self._verdicts(found, found_links, observations)

    def _histories(self, observed: Sequence[IterationObservations]) -> NDArray[np.float64]:
        """[iterations, units] residuals of first iterations."""
        of_workers = (self._bursts.residuals(*self.expected.workers(each), stopped=stopped(each)) for each in observed)
        return np.stack([self._units.average(each) for each in of_workers])

    def _link_histories(self, observed: Sequence[IterationObservations]) -> NDArray[np.float64]:
        """[iterations, links] likewise."""
        return np.stack([self._link_bursts.residuals(*self.expected.links(each)) for each in observed])

    def work_added(self) -> NDArray[np.float64]:
        """[workers] how much more work each one's stage had in the last iteration, log of the ratio of times."""
        return self._units.spread(self.workers.levels.of_stage)

    def _faster_than_stage(self) -> NDArray[np.bool_]:
        """[units] which healthy units became faster while others of their stage did not: costs are the others'."""
        levels, stage = self.workers.levels, self._units.stage
        faster = levels.faster.now | (levels.faster.level < 0)
        as_usual = np.bincount(stage, ~faster & ~levels.slow) > 0
        return faster & as_usual[stage]

    def learned(self) -> Learned:
        """What another run of the job can start from."""
        return Learned(
            self.expected.model,
            UnitsNoise(tuple(self._units.members), self.workers.known_noise()),
            UnitsNoise(tuple(_pairs(self._layout)), self.links.known_noise()),
        )

    # Verdicts

    def _verdicts(
        self, workers: Sequence[Finding], links: Sequence[Finding], observations: IterationObservations
    ) -> list[Verdict]:
        of_workers = [verdict for each in workers for verdict in self._of_workers(each, observations)]
        return of_workers + [self._of_link(each, observations) for each in links]

    def _of_workers(self, finding: Finding, observations: IterationObservations) -> list[Verdict]:
        members = self._units.members[finding.unit]
        culprits = members if len(members) == 1 else tuple(self._named.get(members, ()))
        if finding.change is Change.RECOVERY:
            self._named.pop(members, None)
            self._suspicions.pop(members, None)
        elif not culprits:
            slowdown = float(-np.expm1(-finding.excess))
            self._suspicions[members] = Suspicion(members, slowdown, finding.since, observations.iteration)
        speeds = [_speed(each) for each in _interval(finding)]
        return [_verdict(Kind.COMPUTE, (worker,), finding, speeds, observations) for worker in culprits]

    def _of_link(self, finding: Finding, observations: IterationObservations) -> Verdict:
        first, second = map(int, self._layout.links[finding.unit])
        size = float(self._link_size[finding.unit])
        speeds = [self.expected.bandwidth(finding.unit, each, size) for each in _interval(finding)]
        return _verdict(Kind.LINK, (first, second), finding, speeds, observations)

    def suspicions(self) -> list[Suspicion]:
        """Groups with work in which some unidentified worker is slow."""
        units = self._units.members
        return [
            replace(each, reference=self._reference(units.index(members)))
            for members, each in self._suspicions.items()
            if members in units
        ]

    def _reference(self, unit: int) -> int | None:
        """A worker of a healthy unit of the same stage, the one whose level is nearest: the device most like it."""
        levels, stage = self.workers.levels, self._units.stage
        well = np.flatnonzero((stage == stage[unit]) & ~levels.slow & ~levels.faster.now)
        if not well.size:
            return None
        return self._units.members[well[np.abs(levels.level[well] - levels.level[unit]).argmin()]][0]

    def idle_suspects(self, iteration: int) -> list[Suspicion]:
        """Workers that were slow when an epoch left them without work, each with a healthy worker as reference."""
        well = np.flatnonzero(~self._units.spread(self.workers.levels.slow))
        if not well.size:
            return []
        reference = int(self._layout.workers[well[0]])
        return [
            Suspicion(members, float(-np.expm1(-known.excess)), known.began, iteration, reference, idle=True)
            for members, known in self._idle_workers.items()
            if known.slow and len(members) == 1
        ]

    def recheck(
        self, suspicion: Suspicion, culprits: Mapping[int, float], observations: IterationObservations
    ) -> list[Verdict]:
        """Apply validation to one of `idle_suspects`: it is as slow as before, or healthy again; see `settle`."""
        worker = suspicion.workers[0]
        known = self._idle_workers.get((worker,))
        if known is None or not known.slow or worker in culprits:
            return []
        self._idle_workers[worker,] = replace(known, slow=False, excess=0.0)
        recovery = Finding(0, Change.RECOVERY, 0.0, 0.0, observations.iteration, 0, 0.0)
        return [_verdict(Kind.COMPUTE, (worker,), recovery, (1.0, 1.0, 1.0), observations)]

    def settle(
        self, suspicion: Suspicion, culprits: Mapping[int, float], observations: IterationObservations
    ) -> list[Verdict]:
        """Apply a finished validation. If it found no culprit, the suspicion stays, for another validation.

        Args:
            suspicion: one of `suspicions`.
            culprits: the result of `validation.culprits`.
            observations: the last ones.
        """
        if suspicion.workers not in (each.workers for each in self.suspicions()) or not culprits:
            return []
        del self._suspicions[suspicion.workers]
        unit = self._units.members.index(suspicion.workers)
        self._named[suspicion.workers] = dict(culprits)
        finding = self.workers.state(unit, suspicion.since)
        alone = len(culprits) == 1
        found = {worker: finding if alone else replace(finding, excess=-log(p)) for worker, p in culprits.items()}
        return [
            _verdict(Kind.COMPUTE, (worker,), each, [_speed(excess) for excess in _interval(each)], observations)
            for worker, each in found.items()
        ]

    # What others ask

    def speed(self, worker: int) -> float:
        """Last estimate of a worker's p; 1.0 unless it is slow."""
        for members, excess in _slow(self._units.members, self.workers, self._idle_workers):
            named = self._named.get(members, {})
            if worker in (members if len(members) == 1 else named):
                return named[worker] if len(named) > 1 else _speed(excess)
        return 1.0

    def link_speed(self, ends: tuple[int, int]) -> float:
        """Last estimate of a link's p; 1.0 unless it is slow."""
        pairs = _pairs(self._layout)
        for pair, excess in _slow(pairs, self.links, self._idle_links):
            if set(ends) == set(pair):
                if pair not in pairs:
                    return _speed(excess)
                link = pairs.index(pair)
                return self.expected.bandwidth(link, excess, float(self._link_size[link]))
        return 1.0


def _slow(units: Sequence[Members], tracker: Tracker, idle: Mapping[Members, Known]) -> Iterator[tuple[Members, float]]:
    """The units known to be slow, with or without work, and their excess."""
    for unit in map(int, np.flatnonzero(tracker.levels.slow)):
        yield units[unit], float(tracker.levels.excess[unit])
    for members, known in idle.items():
        if known.slow:
            yield members, known.excess


def _in_bursts(findings: Sequence[Finding], units: int) -> NDArray[np.bool_]:
    """[units] which of them were found to be slow in bursts."""
    return np.isin(np.arange(units), [each.unit for each in findings if each.in_bursts])


def _speed(excess: float) -> float:
    return min(exp(-excess), 1.0)


def _interval(finding: Finding) -> tuple[float, float, float]:
    """The excess, its highest value and its lowest value with 95 % confidence, never below 0."""
    reach = CONFIDENCE * finding.error
    return max(finding.excess, 0.0), max(finding.excess + reach, 0.0), max(finding.excess - reach, 0.0)


def _verdict(
    kind: Kind,
    workers: tuple[int, ...],
    finding: Finding,
    speeds: Sequence[float],
    observations: IterationObservations,
) -> Verdict:
    recovered = finding.change is Change.RECOVERY
    evidence = {"log_ratio": finding.excess, "standard_error": finding.error, "noise": finding.noise,
                "window": float(finding.window)}  # fmt: skip
    return Verdict(
        kind=kind,
        change=finding.change,
        workers=workers,
        speed=1.0 if recovered else speeds[0],
        speed_low=speeds[1],
        speed_high=speeds[2],
        since=finding.since,
        iteration=observations.iteration,
        epoch=observations.epoch,
        evidence=evidence,
    )


def _pairs(layout: Layout) -> list[Members]:
    """The ends of each link, smaller id first."""
    return [(min(pair), max(pair)) for pair in layout.links.tolist()]


def _sender_node(layout: Layout) -> NDArray[np.int64]:
    """[links] the node of each link's first end: links of a node share its network card."""
    node_of = dict(zip(layout.workers.tolist(), layout.node.tolist(), strict=True))
    return np.array([node_of.get(int(first), 0) for first, _ in layout.links], dtype=np.int64)


def _usual_size(observations: Sequence[IterationObservations]) -> NDArray[np.float64]:
    """[links] median bytes of a transfer."""
    sizes = np.concatenate([each.transfer_bytes for each in observations], axis=1)
    known = np.isfinite(sizes).any(axis=1)
    usual = np.zeros(len(sizes))
    usual[known] = np.nanmedian(sizes[known], axis=1)
    return usual
