# SPDX-License-Identifier: Apache-2.0
"""What others on node 0 ask of the coordinator, which takes it up in its own thread.

May import: the standard library and `protocol`.
"""

from __future__ import annotations

import queue

from megatron_resihp.protocol.messages import NodeLost, NodesDown, PlanRequest
from megatron_resihp.protocol.notices import ValidationOrder

Request = ValidationOrder | PlanRequest | NodesDown | NodeLost


class Requests:
    """Calls from any thread, in their order."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def validate(self, order: ValidationOrder) -> None:
        """Have workers measure."""
        self._waiting.put(order)

    def change_plan(self, request: PlanRequest) -> None:
        """Have another plan taken."""
        self._waiting.put(request)

    def tell_down(self, message: NodesDown) -> None:
        """Tell what was asked by `AskDown`."""
        self._waiting.put(message)

    def tell_lost(self, message: NodeLost) -> None:
        """Tell of a node whose agent has never been connected."""
        self._waiting.put(message)

    def take(self) -> list[Request]:
        """The requests since the last call; for the coordinator."""
        return [self._waiting.get() for _ in range(self._waiting.qsize())]
