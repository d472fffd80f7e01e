# SPDX-License-Identifier: Apache-2.0
"""Workers that a coordinator before this one knew to be slow, until this one's detector knows better.

It learns anew what is normal, so it may take a slow worker's level for healthy, and of workers without work it sees
nothing. So these are measured beside a healthy worker, with or without work, until they are well. Pure; imports
`events` and this package.
"""

from collections.abc import Collection, Iterable, Mapping

from megatron_resihp.detector.validation import Suspicion
from megatron_resihp.detector.verdict import Change, Kind, Verdict
from megatron_resihp.events import detection as told


class Remembered:
    """The slow workers of a run that this detector hasn't found itself.

    Args:
        verdicts: of those that were slow. Links can't be measured; they stay slow until the detector finds otherwise.
    """

    def __init__(self, verdicts: Iterable[told.Verdict]) -> None:
        self._slow = {each.workers[0]: each for each in verdicts if each.kind == Kind.COMPUTE}

    def __bool__(self) -> bool:
        return bool(self._slow)

    def suspects(self, there: Collection[int], well: Iterable[int], iteration: int) -> list[Suspicion]:
        """Those to measure.

        Args:
            there: workers that can be.
            well: workers whose measurement can be compared with, the best first.
        """
        reference = next((worker for worker in well if worker not in self._slow), None)
        return [
            Suspicion((worker, reference), 1.0 - each.speed, each.since, iteration, idle=True)
            for worker, each in self._slow.items()
            if worker in there and reference is not None
        ]

    def found(self, verdicts: Iterable[Verdict]) -> None:
        """The detector has judged; what it says of a worker holds from now on."""
        for verdict in verdicts:
            if verdict.kind is Kind.COMPUTE:
                self._slow.pop(verdict.workers[0], None)

    def settle(self, suspicion: Suspicion, culprits: Mapping[int, float], epoch: int, iteration: int) -> list[Verdict]:
        """Apply a validation (`validation.culprits`) to one of `suspects`: it is as slow as before, or healthy."""
        worker = suspicion.workers[0]
        if not suspicion.idle or worker not in self._slow or worker in culprits:
            return []
        del self._slow[worker]
        return [Verdict(Kind.COMPUTE, Change.RECOVERY, (worker,), 1.0, 1.0, 1.0, iteration, iteration, epoch)]
