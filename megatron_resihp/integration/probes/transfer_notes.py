# SPDX-License-Identifier: Apache-2.0
"""What one worker notes of its transfers. Called on the training thread. Imports the probes' modules.

Interleaved schedules post a transfer, run an op, and wait only then. A transfer that was over by then ended at an
unknown moment. To take the end of the op for it would make a slow worker's links slow.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_resihp.detector.input.records import OpKind
from megatron_resihp.integration.probes.page import Page
from megatron_resihp.integration.probes.probe_sheet import BYTES, DONE, PEER, POSTED, RECEIVED

NAN = float("nan")
AT_ONCE_S: Final = 1e-4
"""What took less to wait for had been there before."""

PadTransfer = Callable[[int, float, float], float]
"""(peer, came, bytes), called when a tensor has been received, before that is noted. `came`: when that was. Returns the
seconds by which the host has made it later than it would have been on the device."""


@dataclass(frozen=True)
class InTransit:
    """What ops and transfers tell each other of tensors, by the tensors' identity.

    Attributes:
        of_tensor: chunk and micro-batch of what an op has made and may be sent.
        received: rows of tensors that no op has taken as its input yet.
    """

    of_tensor: dict[int, tuple[int, int]] = field(default_factory=dict)
    received: dict[int, list[Any]] = field(default_factory=dict)

    def clear(self) -> None:
        """Nothing is in transit."""
        self.of_tensor.clear()
        self.received.clear()


class TransferNotes:
    """Takes the notes of transfers.

    Attributes:
        workers: id of the worker that has each torch rank.
    """

    def __init__(self, page: Page, transit: InTransit) -> None:
        self.workers: Sequence[int] = ()
        self._page, self._transit = page, transit

    def post(self, tensor: Any, rank: int, kind: OpKind, received: bool, posted: float) -> list[Any]:
        """A transfer has been posted; returns its row, for `done`."""
        chunk, micro_batch = (0, 0) if received else self._transit.of_tensor.pop(id(tensor), (0, 0))
        row = [self.workers[rank], received, kind, chunk, micro_batch, posted, NAN, tensor.nbytes]
        self._page.sheet.transfers.append(row)
        if received:
            # Which micro-batch it was is known when an op takes it as its input.
            self._transit.received[id(tensor)] = row
        return row

    @property
    def ops_run(self) -> int:
        """How many ops this worker has run in the iteration so far."""
        return len(self._page.sheet.ops)

    def done(self, rows: Iterable[list[Any]], pad: PadTransfer | None, hidden_until: float | None = None) -> None:
        """Transfers that were posted together are done.

        One that is padded begins when it has really come: what gloo took for it is not what the device's links take.

        Args:
            hidden_until: if ops were run since they were posted, the host's monotonic seconds at which they were waited
                for.
        """
        for row in rows:
            came = self._page.clock.mark()
            row[DONE] = came if hidden_until is None or self._waited_for(row, hidden_until, came) else NAN
            if pad is not None and row[RECEIVED]:
                late = pad(row[PEER], came, float(row[BYTES]))
                row[POSTED], row[DONE] = came, self._page.clock.mark() - late

    def _waited_for(self, row: list[Any], began: float, came: float) -> bool:
        """Whether a transfer ended as it was waited for. A wait that is shorter than what ran before may be the host's.

        On a device, the host doesn't know.
        """
        return self._page.clock.immediate and came - began > max(AT_ONCE_S, began - row[POSTED])

    def note(
        self, peer: int, received: bool, kind: OpKind, chunk: int, micro_batch: int, posted: float, done: float,
        size: float,
    ) -> None:  # fmt: skip
        """A transfer of which all is known, as a row of TRANSFER says it. `done`: NaN if it was not timed."""
        self._page.sheet.transfers.append([peer, received, kind, chunk, micro_batch, posted, done, size])
