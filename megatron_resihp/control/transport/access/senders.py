# SPDX-License-Identifier: Apache-2.0
"""Whether a message to the coordinator may come from whom it comes. Pure. May import `protocol`."""

from __future__ import annotations

import json

from megatron_resihp.protocol.messages import NodeReport


def speaks_for(worker: int, text: bytes) -> bool:
    """Whether a worker may send this: it names that one as its sender, and speaks of no other as its own. What is no
    message names nobody, and the coordinator says so."""
    try:
        message = json.loads(text.decode(errors="replace"))  # as the coordinator reads it
    except (ValueError, RecursionError):
        return True
    if not isinstance(message, dict):
        return True
    if message.get("kind") == NodeReport.__name__:
        return False  # an agent tells that, of what it has let through
    body = message.get("body")
    about = body.get("worker", worker) if isinstance(body, dict) else worker
    return message.get("sender") == f"worker {worker}" and about == worker
