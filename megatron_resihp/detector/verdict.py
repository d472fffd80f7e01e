# SPDX-License-Identifier: Apache-2.0
"""The detector's findings: which worker or link is slow, since when, how certain, and why.

Imports only the standard library.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What is slow."""

    COMPUTE = "compute"
    LINK = "link"


class Change(StrEnum):
    """What happened to the worker or link."""

    ONSET = "onset"
    SEVERITY = "severity"
    RECOVERY = "recovery"


@dataclass(frozen=True)
class Verdict:
    """One finding.

    Attributes:
        kind: compute or link.
        change: it became slow, its speed changed while slow, or it is healthy again.
        workers: the worker's id, or the two ends of the link.
        speed: p in (0, 1], relative to its own healthy speed; 1.0 for a recovery.
        speed_low, speed_high: 95 % confidence interval of p.
        since: estimated first iteration of the change.
        iteration: the iteration whose records decided.
        epoch: the epoch of that iteration.
        evidence: the numbers behind the verdict, by name, for the event log.
    """

    kind: Kind
    change: Change
    workers: tuple[int, ...]
    speed: float
    speed_low: float
    speed_high: float
    since: int
    iteration: int
    epoch: int
    evidence: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as event logs and files hold them."""
        return {**asdict(self), "workers": list(self.workers), "evidence": dict(self.evidence)}
