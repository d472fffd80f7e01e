# SPDX-License-Identifier: Apache-2.0
"""Validations in progress: what suspects measure, and what their answers mean.

Pure. Only one runs at a time, since all workers must know of it before it can run. Imports this package and `protocol`.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from megatron_resihp.detector.input.observations import Layout
from megatron_resihp.detector.validation import Suspicion, culprits, plan_validation
from megatron_resihp.protocol.notices import ValidationOrder

PAUSE: Final = 50
"""Iterations before the same suspects may be asked again, and after which missing answers are given up."""

Settled = tuple[Suspicion, Mapping[int, float]]
"""A suspicion, with its culprits and their speeds."""


class Inquiries:
    """Asks suspects to measure, and evaluates their answers.

    Args:
        gemm_shape: (m, n, k) of a matrix product of the training.
        transfer_size: bytes of a transfer between stages.
    """

    def __init__(self, gemm_shape: tuple[int, int, int], transfer_size: int) -> None:
        self._gemm_shape = gemm_shape
        self._transfer_size = transfer_size
        self._number = self._asked_at = 0
        self._suspicions: Sequence[Suspicion] = ()
        self._seconds: dict[int, Sequence[float]] = {}
        self._not_before: dict[tuple[int, ...], int] = {}

    @property
    def asked(self) -> Sequence[Suspicion]:
        """The suspicions under validation."""
        return self._suspicions

    def ask(self, suspicions: Sequence[Suspicion], layout: Layout, iteration: int) -> ValidationOrder | None:
        """What to measure; None while answers are awaited, or if there is nothing new to ask."""
        if iteration >= self._asked_at + PAUSE:
            self.drop()
        fresh = [each for each in suspicions if iteration >= self._not_before.get(each.workers, 0)]
        if self._suspicions or not fresh:
            return None
        links = [(first, second) for first, second in layout.links.tolist()]
        plan = plan_validation(fresh, [self._gemm_shape], links, self._transfer_size)
        self._number += 1
        self._suspicions, self._seconds, self._asked_at = fresh, {}, iteration
        self._not_before |= {each.workers: iteration + PAUSE for each in fresh}
        return ValidationOrder(self._number, layout.epoch, plan.gemms, plan.transfers)

    def answer(self, number: int, worker: int, gemm_seconds: Sequence[float]) -> list[Settled]:
        """Take a worker's measurement; once all suspects have answered, returns the settled suspicions."""
        if number != self._number or not self._suspicions:
            return []
        self._seconds[worker] = gemm_seconds
        if any(suspect not in self._seconds for each in self._suspicions for suspect in each.workers):
            return []
        found: list[Settled] = [(each, culprits(each, self._seconds)) for each in self._suspicions]
        self.drop()
        return found

    def drop(self) -> None:
        """Stop waiting for answers: the epoch ended, or an answer was lost."""
        self._suspicions, self._seconds = (), {}
