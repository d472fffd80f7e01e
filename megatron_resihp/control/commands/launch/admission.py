# SPDX-License-Identifier: Apache-2.0
"""How another node gets the secret of the job that it belongs to, before it starts anything.

May import: the standard library and `control.transport`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from megatron_resihp.control.transport.access.gate import RefusedSecretError
from megatron_resihp.control.transport.access.secret import Secret, UnreadableError, find_secret, is_secret_given
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.client import connect
from megatron_resihp.control.transport.store.store import Store

SEEN_WITHIN_S: Final = 60.0
"""A file system of several nodes may show an earlier run's secret for so long, or none."""
LOOK_S: Final = 0.5


def admitted[T](
    address: Address,
    run_dir: Path,
    timeout_s: float,
    check: Callable[[Store], T],
    pause: Callable[[float], None] = time.sleep,
) -> tuple[Secret, T]:
    """The secret that the job at this address takes, and what `check` has found there.

    Args:
        timeout_s: how long to wait for the job. It serves its store.
        check: whether this node belongs to that job: a file might still say what an earlier one has written.
        pause: waits for so many seconds before the next look.

    Raises:
        StoreError: it takes none that this process has, or does not answer; or raised by `check`.
    """
    deadline = time.monotonic() + min(timeout_s, SEEN_WITHIN_S)
    while True:
        try:
            found = find_secret(run_dir)
            with closing(connect(address, found, timeout_s)) as store:
                return found, check(store)
        except TimeoutError as error:
            raise StoreError(f"the coordinator at {address} does not say what job it runs ({error})") from error
        except (RefusedSecretError, UnreadableError):
            if is_secret_given() or time.monotonic() > deadline:
                raise
        pause(LOOK_S)
