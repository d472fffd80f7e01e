# SPDX-License-Identifier: Apache-2.0
"""What the last recovery took, until it is in the event log. Imports this package's `state`."""

from dataclasses import dataclass, field

from megatron_resihp.integration.state.footprint import Footprint


@dataclass
class RecoveryNotes:
    """Notes of one recovery.

    Attributes:
        since: when the death was noticed that the current epoch recovered from, until its first step.
        phases: seconds of each phase.
        footprint: what the rebuild took of the device; None: nothing was built.
        last_step_at: when the last step was taken, by the wall clock; None: before the first one after a recovery.
    """

    since: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    footprint: Footprint | None = None
    last_step_at: float | None = None
