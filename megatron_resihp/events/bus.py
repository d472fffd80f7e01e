# SPDX-License-Identifier: Apache-2.0
"""Where the events of a run go: to all subscribers of their class.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from megatron_resihp.events.event import Event


class EventBus:
    """One per run; any thread may publish.

    Subscribers are called in the publisher's thread, in the order in which they subscribed, so they must be quick. One
    that publishes in turn does so before later subscribers have heard the first event.
    """

    def __init__(self) -> None:
        self._subscribers: tuple[tuple[tuple[type[Event], ...], Callable[[Any], None]], ...] = ()

    def subscribe[E: Event](self, take: Callable[[E], None], *kinds: type[E]) -> None:
        """Have `take` called with each event of these classes, or of classes made from them."""
        self._subscribers = (*self._subscribers, (kinds, take))

    def publish(self, event: Event) -> None:
        """Tell of an event that has its time. A subscriber that fails says so, and keeps it from no other."""
        for kinds, take in self._subscribers:
            if isinstance(event, kinds):
                try:
                    take(event)
                except Exception:
                    traceback.print_exc()

    def close(self) -> None:
        """Deliver nothing more: threads that are late must not write to a log that is closed."""
        self._subscribers = ()
