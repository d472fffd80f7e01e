# SPDX-License-Identifier: Apache-2.0
"""What went wrong on the way from the probes to the detector: counted, reported, never fatal. Standard library only."""

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Numbers of what was received and of what was left out, and why.

    Attributes:
        received: messages.
        truncated, foreign, version, damaged: messages that were no records, by `wire.Fault`.
        other_epoch: records of an epoch that is not in force.
        unknown_worker: records of workers that have no work in the epoch.
        duplicate: second records of the same worker and iteration.
        late: records of iterations that were already judged without them.
        lost: records that workers say they have dropped.
        missing: records that an iteration was judged without.
        abandoned: iterations of which less than half of the workers reported.
        bad_times: ops and spans with durations that cannot be: NaN, negative, longer than the iteration.
        bad_transfers: transfers whose two sides cannot both be right, as when a clock jumped.
        unpaired: sides of transfers whose other side is missing.
        unsynchronised: transfers between machines whose clocks could not be compared.
    """

    received: int = 0
    truncated: int = 0
    foreign: int = 0
    version: int = 0
    damaged: int = 0
    other_epoch: int = 0
    unknown_worker: int = 0
    duplicate: int = 0
    late: int = 0
    lost: int = 0
    missing: int = 0
    abandoned: int = 0
    bad_times: int = 0
    bad_transfers: int = 0
    unpaired: int = 0
    unsynchronised: int = 0

    def nonzero(self) -> dict[str, int]:
        """The counters that count something, but for `received`."""
        return {name: count for name, count in asdict(self).items() if count and name != "received"}
