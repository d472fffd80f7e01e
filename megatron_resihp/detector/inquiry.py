# SPDX-License-Identifier: Apache-2.0
"""Validations in progress: what suspects measure, and what their answers mean.

Pure. Only one runs at a time, since all workers must know of it before it can run. Imports this package and `protocol`.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from megatron_resihp.detector.relapses import Relapses
from megatron_resihp.detector.validation import Suspicion, culprits, products
from megatron_resihp.protocol.notices import ValidationOrder

PAUSE: Final = 50
"""Iterations before the same suspects may be asked again, and after which missing answers are given up. They double
from the second time on that answers name nobody: each is another chance to name a healthy device. For a worker without
work they double each time that it has only looked well."""

Settled = tuple[Suspicion, Mapping[int, float]]
"""A suspicion, with its culprits and their speeds."""


class Inquiries:
    """Asks suspects to measure, and evaluates their answers.

    Args:
        gemm_shape: (m, n, k) of a matrix product of the training.

    Attributes:
        relapses: of workers that were asked without work.
    """

    def __init__(self, gemm_shape: tuple[int, int, int]) -> None:
        self._gemm_shape = gemm_shape
        self._number = self._asked_at = 0
        self._suspicions: Sequence[Suspicion] = ()
        self._seconds: dict[int, Sequence[float]] = {}
        self._last_asked: dict[tuple[int, ...], int] = {}
        self._fruitless: dict[tuple[int, ...], tuple[int, int]] = {}
        """By suspects, the first slow iteration of a suspicion and how often nobody was named for it."""
        self.relapses = Relapses()

    @property
    def asked(self) -> Sequence[Suspicion]:
        """The suspicions under validation."""
        return self._suspicions

    def ask(self, suspicions: Sequence[Suspicion], epoch: int, iteration: int) -> ValidationOrder | None:
        """What to measure; None while answers are awaited, or if there is nothing new to ask."""
        if iteration >= self._asked_at + PAUSE:
            self.drop()
        fresh = [each for each in suspicions if self._may_ask(each, iteration)]
        if self._suspicions or not fresh:
            return None
        self._number += 1
        self._suspicions, self._seconds, self._asked_at = fresh, {}, iteration
        self._last_asked |= {_asked_for(each): iteration for each in fresh}
        return ValidationOrder(self._number, epoch, products(fresh, [self._gemm_shape]))

    def answer(self, number: int, worker: int, gemm_seconds: Sequence[float]) -> list[Settled]:
        """Take a worker's measurement; once all suspects have answered, returns the settled suspicions."""
        if number != self._number or not self._suspicions:
            return []
        self._seconds[worker] = gemm_seconds
        if any(suspect not in self._seconds for each in self._suspicions for suspect in each.measured):
            return []
        found: list[Settled] = [(each, culprits(each, self._seconds)) for each in self._suspicions]
        for each, named in found:
            if not named and not each.idle:
                self._fruitless[each.workers] = each.since, self._times_fruitless(each) + 1
        self.drop()
        return found

    def relapsed(self, worker: int, iteration: int) -> int:
        """A worker with work became slow. If it only looked well before, returns how often it has by now, else 0."""
        if not self.relapses.found_slow(worker):
            return 0
        self._last_asked[worker,] = iteration
        return self.relapses.times(worker)

    def _may_ask(self, suspicion: Suspicion, iteration: int) -> bool:
        asked = self._last_asked.get(_asked_for(suspicion))
        if suspicion.idle:
            doublings = self.relapses.times(suspicion.workers[0])
        else:
            doublings = max(self._times_fruitless(suspicion) - 1, 0)
        return asked is None or iteration >= asked + (PAUSE << doublings)

    def _times_fruitless(self, suspicion: Suspicion) -> int:
        since, times = self._fruitless.get(suspicion.workers, (suspicion.since, 0))
        return times if since == suspicion.since else 0

    def drop(self) -> None:
        """Stop waiting for answers: the epoch ended, or an answer was lost."""
        self._suspicions, self._seconds = (), {}


def _asked_for(suspicion: Suspicion) -> tuple[int, ...]:
    """Whom a suspicion is of, whatever worker is asked as a reference."""
    return suspicion.workers[:1] if suspicion.idle else suspicion.workers
