# SPDX-License-Identifier: Apache-2.0
"""The online detector: one iteration's observations in, verdicts out. Imports numpy and this package.

It skips unrepresentative iterations, warms up, and then judges every iteration (`judge`). Bad input is counted and left
out; no input can end the monitor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from megatron_resihp.config import FALSE_ALARMS_PER_JOB
from megatron_resihp.cost.fitted.model import CostModel
from megatron_resihp.detector.input.observations import IterationObservations, Layout, with_chunks, without
from megatron_resihp.detector.judging.expected import explains
from megatron_resihp.detector.judging.judge import Judge
from megatron_resihp.detector.judging.learned import Learned
from megatron_resihp.detector.notices import Disturbances, Notice, data_stall, work_of_a_stage
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.validation import Suspicion
from megatron_resihp.detector.verdict import Verdict

MOST_NOTICES: Final = 1000
"""Most notices that are kept until taken; older ones are dropped."""


@dataclass
class Counters:
    """Bad input, counted and left out.

    Attributes:
        other_epoch: iterations of an epoch that is over, or not known yet.
        repeated: iterations that were not newer than the last.
        missing: iterations that never arrived.
        unreported: records of single workers that did not arrive.
        malformed: iterations whose arrays do not fit the layout, or in which nobody recorded an op.
    """

    other_epoch: int = 0
    repeated: int = 0
    missing: int = 0
    unreported: int = 0
    malformed: int = 0

    def accept(self, observations: IterationObservations, layout: Layout, last: IterationObservations | None) -> bool:
        """Whether an iteration can be judged.

        Args:
            layout: of the epoch.
            last: the iteration that was accepted last.
        """
        if observations.epoch != layout.epoch:
            self.other_epoch += 1
            return False
        if last and last.epoch == observations.epoch:
            if observations.iteration <= last.iteration:
                self.repeated += 1
                return False
            self.missing += observations.iteration - last.iteration - 1
        fits = len(observations.compute) == layout.workers.size and len(observations.transfer) == len(layout.links)
        if not fits or not observations.compute.size:
            self.malformed += 1
            return False
        self.unreported += int((~observations.reported).sum())
        return True


class Monitor:
    """Judges one job, online; a `detector.interface.Detector`."""

    def __init__(
        self,
        layout: Layout,
        false_alarms_per_job: float = FALSE_ALARMS_PER_JOB,
        expected_iterations: int = 100_000,
        settings: Settings | None = None,
        known: Learned | None = None,
    ) -> None:
        """Start without any knowledge of the job's devices.

        Args:
            layout: the workers and links in the order of the observations' arrays.
            false_alarms_per_job: accepted false alarms in a whole job, on average.
            expected_iterations: how many iterations the job is expected to have.
            settings: all other settings.
            known: what an earlier run of the job learned. The monitor then begins as in a new epoch: the first
                iterations tell the devices' levels. If they contradict the known costs, warm-up is as usual.
        """
        self._settings = settings or Settings()
        self._budget = false_alarms_per_job, expected_iterations
        self._layout = layout
        self._judge: Judge | None = None
        self._known = known
        self._notices: list[Notice] = []
        self._last: IterationObservations | None = None
        self.counters = Counters()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        known = self._judge or self._known
        self._to_skip = self._settings.skipped
        self._to_learn = self._settings.settling if known else self._settings.warm_up
        self._learning: list[IterationObservations] = []
        self._disturbances = Disturbances(self._layout.workers.size)

    # What others ask

    @property
    def resumed(self) -> bool:
        """Whether it judges, or will judge, by what an earlier run learned."""
        return self._known is not None

    def learned(self) -> Learned | None:
        """What another run of the job can start from; None before the end of warm-up."""
        return self._judge.learned() if self._judge else None

    @property
    def model(self) -> CostModel | None:
        """The cost model; None before the end of warm-up."""
        return self._judge.expected.model if self._judge else None

    @property
    def watching(self) -> bool:
        """Whether iterations are judged rather than learned from."""
        return self._to_learn == 0

    def speed(self, worker: int) -> float:
        """The worker's speed p as last estimated, 1.0 unless it is known to be slow."""
        return self._judge.speed(worker) if self._judge else 1.0

    def link_speed(self, ends: tuple[int, int]) -> float:
        """The share of its bandwidth that a link has, 1.0 unless it is known to be slow."""
        return self._judge.link_speed(ends) if self._judge else 1.0

    def suspicions(self) -> list[Suspicion]:
        """Groups in which some unidentified worker is slow, for validation."""
        return self._judge.suspicions() if self._judge else []

    def idle_suspects(self) -> list[Suspicion]:
        """Slow workers without work to judge them by, for validation now and then."""
        if self._judge is None or self._last is None or not self.watching:
            return []
        return self._judge.idle_suspects(self._last.iteration)

    def settle(self, suspicion: Suspicion, culprits: Mapping[int, float]) -> list[Verdict]:
        """Apply a validation that named these culprits, with their speeds (`validation.culprits`), or none."""
        if self._judge is None or self._last is None:
            return []
        settle = self._judge.recheck if suspicion.idle else self._judge.settle
        return settle(suspicion, culprits, self._last)

    def take_notices(self) -> list[Notice]:
        """Return and clear the notices: time that no device is to blame for."""
        taken, self._notices = self._notices, []
        return taken

    # Input

    def change_layout(self, layout: Layout) -> None:
        """Begin a new epoch; its first iterations are not judged."""
        self._layout = layout
        self._begin_epoch()

    def observe(self, observations: IterationObservations) -> list[Verdict]:
        """New verdicts after this iteration; iterations arrive in ascending order."""
        if not self.counters.accept(observations, self._layout, self._last):
            return []
        self._last = observations
        self._note(data_stall(observations, self._layout))
        left_out = self._disturbances.see(observations)
        if self._to_skip > 0:
            self._to_skip -= 1
            return []
        if self._to_learn > 0:
            return self._learn(without(observations, left_out))
        assert self._judge is not None
        verdicts = self._judge.judge(observations, left_out)
        added, least = self._judge.work_added(), self._settings.smallest_slowdown
        self._note(work_of_a_stage(observations, self._layout, added, least))
        return verdicts

    def _note(self, notice: Notice | None) -> None:
        if notice:
            self._notices = [*self._notices[-MOST_NOTICES + 1 :], notice]

    def _learn(self, observations: IterationObservations) -> list[Verdict]:
        self._learning.append(observations)
        self._to_learn -= 1
        if self._to_learn > 0:
            return []
        learned, self._learning = _alike(self._learning), []
        if self._judge:
            return self._judge.moved(self._layout, learned)
        if self._known and not explains(self._known.model, self._layout, learned):
            self._known = None
            self._to_learn, self._learning = max(self._settings.warm_up - len(learned), 1), learned
            return []
        self._judge = Judge(self._layout, learned, *self._budget, self._settings, self._known)
        return self._judge.first_verdicts(observations)


def _alike(observed: Sequence[IterationObservations]) -> list[IterationObservations]:
    """The observations, all with the number of model chunks that is most common."""
    chunks = int(np.bincount([each.compute.shape[2] for each in observed]).argmax())
    return [with_chunks(each, chunks) for each in observed]
