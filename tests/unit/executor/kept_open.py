"""For tests whose members are all in one process, where what one keeps open of a connection is the others' too."""

from megatron_resihp.executor.communicators import Communicators


def close_what_is_kept_open(*members: Communicators) -> None:
    """Called before any of them frees its groups: gloo ends the process if a socket that it closes has a duplicate."""
    for member in members:
        for connection in member._kept_open.values():
            connection.close()
        member._kept_open.clear()
