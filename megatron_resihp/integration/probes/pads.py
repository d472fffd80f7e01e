# SPDX-License-Identifier: Apache-2.0
"""What makes ops and transfers of this worker last longer than they would. May import this package's other modules."""

from megatron_resihp.integration.probes.device_slowing import DeviceSlowing
from megatron_resihp.integration.probes.op_notes import PadOp
from megatron_resihp.integration.probes.padding import Padding
from megatron_resihp.integration.probes.transfer_notes import PadTransfer


class Pads:
    """What the probes call at the end of an op or a transfer.

    Attributes:
        padding: what makes them last as long as on an emulated device; None: nothing does.
        slowing: what slows this worker's device in fault injections; None: it has none, its agent stops the process.
    """

    def __init__(self) -> None:
        self.padding: Padding | None = None
        self.slowing: DeviceSlowing | None = None

    def begin_epoch(self) -> None:
        """Ops are no longer those that were padded until now."""
        if self.slowing is not None:
            self.slowing.begin_epoch()

    @property
    def pad_op(self) -> PadOp | None:
        """For an op that ends now."""
        if self.padding is not None:
            return self.padding.pad_op
        slowing = self.slowing
        return slowing.pad_op if slowing is not None and slowing.speed < 1.0 else None

    @property
    def pad_transfer(self) -> PadTransfer | None:
        """For a transfer that ends now."""
        return None if self.padding is None else self.padding.pad_transfer
