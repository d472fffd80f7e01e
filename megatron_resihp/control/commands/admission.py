# SPDX-License-Identifier: Apache-2.0
"""How another node gets the secret of the job that it belongs to, before it starts anything.

May import: the standard library and `control.transport`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.gate import RefusedSecretError
from megatron_resihp.control.transport.secret import Secret, UnreadableError, find_secret, is_secret_given
from megatron_resihp.control.transport.store_client import connect

SEEN_WITHIN_S: Final = 60.0
"""A file system of several nodes may show an earlier run's secret for so long, or none."""
LOOK_S: Final = 0.5


def admitted(address: Address, run_dir: Path, timeout_s: float) -> Secret:
    """The secret that the job at this address takes.

    Args:
        timeout_s: how long to wait for the job. It serves its store.

    Raises:
        StoreError: it takes none that this process has, or does not answer.
    """
    deadline = time.monotonic() + min(timeout_s, SEEN_WITHIN_S)
    while True:
        try:
            found = find_secret(run_dir)
            connect(address, found, timeout_s).close()
            return found
        except (RefusedSecretError, UnreadableError):
            if is_secret_given() or time.monotonic() > deadline:
                raise
        time.sleep(LOOK_S)
