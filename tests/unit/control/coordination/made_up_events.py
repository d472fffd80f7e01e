# SPDX-License-Identifier: Apache-2.0
"""Events for tests in which only some fields matter."""

from typing import Any

from megatron_resihp.events.catalogue import EVENTS
from megatron_resihp.events.event import Event
from megatron_resihp.events.fields import fields_of


def made_up(name: str, **told: Any) -> Event:
    """The event of this name; what else it has to have is None."""
    kind: Any = EVENTS[name]
    needed = [field.name for field in fields_of(kind) if field.required]
    found: Event = kind(**{**dict.fromkeys(needed), "time": 0.0, **told})
    return found
