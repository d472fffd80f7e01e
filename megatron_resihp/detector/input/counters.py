# SPDX-License-Identifier: Apache-2.0
"""Counts faults on the way from the probes to the detector; they are reported, never fatal. Standard library only."""

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Numbers of messages received, and of data left out, by reason.

    Attributes:
        received: messages.
        truncated, foreign, version, damaged: messages that were not records, by `wire.Fault`.
        other_epoch: records of an epoch that is not in force.
        unknown_worker: records of workers that have no work in the epoch.
        duplicate: second records of the same worker and iteration.
        late: records of iterations that were already judged without them.
        lost: records that workers say they dropped.
        missing: records that were missing when an iteration was judged.
        abandoned: iterations for which less than half of the workers reported.
        bad_times: ops and spans with impossible durations: NaN, negative, longer than the iteration.
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
        """The counters that are not 0, except `received`."""
        return {name: count for name, count in asdict(self).items() if count and name != "received"}
