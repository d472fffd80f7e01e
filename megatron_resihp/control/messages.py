"""Names of what travels over the store: messages to the coordinator, notices to workers, keys. Imports nothing.

Messages go to one queue, `INBOX`, as JSON objects with a `type`. Notices are numbered keys that every worker reads in
order. Plans and commits have a key per epoch.
"""

from typing import Final

INBOX: Final = "inbox"
"""Queue of messages to the coordinator."""

END: Final = "end"
"""Key that ends the job for the agents: {"code", "reason", "grace_s"} and, but where it is None, "members"."""

LIFELINE_ADDRESS: Final = "lifeline_address"
"""Key with host:port where agents of other nodes connect their lifelines."""

RECORDS_ADDRESS: Final = "records_address"
"""Key with host:port where agents of other nodes send the records of their workers."""

KNOCK_AT: Final = "door/"
"""What the keys begin with that hold host:port where each worker takes connections; see `reach`."""

RUN: Final = "run"
"""Key of a token that this run alone has, by which others know that they talk to it."""

IDENTITY: Final = "identity"
"""Key of a digest of what the job's first worker was started with; what it stands for is under `identity/DIGEST`."""

ANSWERS: Final = "answer/"
"""What the keys begin with under which commands find the coordinator's answers."""

SLOWNESS: Final = "slowness"
"""Kind of the notice of what drills have slowed: {"by_agents", "speeds", "links"}."""

GIVEN_UP: Final = "given_up"
"""Kind of the notice that workers count as dead, whatever their processes do: {"workers", "reason"} and, if none
is to be started in their places, "for_good"."""

LEFT: Final = "left"
"""Kind of the notice that a node which was told to leave may: {"agent", "workers"}."""

SAVE: Final = "save"
"""Kind of the notice that a checkpoint is to be written after an iteration: {"number"}, counted from 1."""

REFUSED_EXIT: Final = 2
"""Exit code of a worker that refuses its arguments, as argparse does, and of the job that it was to begin."""

FENCED_EXIT: Final = 75
"""Exit code of a worker that was given up for dead and is not."""


def plan_key(epoch: int) -> str:
    """Key of an epoch's plan.

    {"plan", "digest", "commit", "held", "groups_of_change", "leaving", "on_trial"}, or
    {"impossible", "commit", "missing"}
    """
    return f"plan/{epoch}"


def go_key(epoch: int) -> str:
    """Key that is set once every member of the epoch is ready and the digests of the state agree."""
    return f"go/{epoch}"


def notice_key(number: int) -> str:
    """Key of the notice with this number.

    {"kind": "broken" | "stop" | "finishing" | "end" | "slowness" | "validate" | "change" | "join" | "dismissed"
    | "left" | "save" | "given_up", ...}
    """
    return f"notice/{number}"
