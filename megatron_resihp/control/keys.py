# SPDX-License-Identifier: Apache-2.0
"""Under which keys of the store what `protocol` describes is found. Imports nothing.

Messages go to one queue, `INBOX`. Notices are numbered keys that every worker reads in order. Plans have a key per
epoch. What no process needs any more is deleted (`coordination.bulletin`).
"""

from typing import Final

INBOX: Final = "inbox"
"""Queue of messages to the coordinator: `protocol.messages.MESSAGES`."""

END: Final = "end"
"""Key that ends the job for the agents: `protocol.published.END`."""

LIVENESS_ADDRESS: Final = "liveness_address"
"""Key with host:port where agents of other nodes open their liveness connections."""

RECORDS_ADDRESS: Final = "records_address"
"""Key with host:port where agents of other nodes send the records of their workers."""

KNOCK_AT: Final = "door/"
"""What the keys begin with that hold host:port where each worker takes connections; see `reach`."""

FORGOTTEN: Final = "notices_forgotten"
"""Key of a number: of the notices below it some have been deleted. See `protocol.notices.NoticesForgotten`."""

TORCH: Final = "torch/"
"""What the keys begin with in which torch's groups meet."""

RUN: Final = "run"
"""Key of a token that this run alone has, by which others know that they talk to it."""

TERM: Final = "term"
"""Key of a number that grows with each coordinator that takes the place of one before; there if one may."""

IDENTITY: Final = "identity"
"""Key of a digest of what the job's first worker was started with; what it stands for is under `identity/DIGEST`."""

SAVED: Final = "saved/"
"""What the keys begin with that each worker sets once it has written its part of an emergency checkpoint."""

ANSWERS: Final = "answer/"
"""What the keys begin with under which commands find what they are answered: `protocol.answers.ANSWERS`."""


def plan_key(epoch: int) -> str:
    """Key of what was decided for an epoch: `protocol.published.DECISIONS`."""
    return f"plan/{epoch}"


def go_key(epoch: int) -> str:
    """Key that is set once every member of the epoch is ready and the digests of the state agree: `published.GO`."""
    return f"go/{epoch}"


def groups_of_epoch(epoch: int) -> str:
    """What follows `TORCH` in the keys of an epoch's groups."""
    return f"resihp/groups/{epoch}/"


def groups_of_change(number: int) -> str:
    """What follows `TORCH` in the keys of groups that were made for a change of plan while training went on."""
    return f"resihp/groups-of-change/{number}/"


def notice_key(number: int) -> str:
    """Key of the notice with this number: `protocol.notices.NOTICES`."""
    return f"notice/{number}"
