# SPDX-License-Identifier: Apache-2.0
"""Losses of undisturbed jobs, which cases with the same flags share. Imports the standard library."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence

from launching import launch
from setting import Setting


def reference_losses(setting: Setting, workers: int, flags: Sequence[str]) -> dict[int, float]:
    """The losses of an undisturbed job, by iteration.

    The first case that asks runs the job. Another, in a process of its own, waits for it meanwhile.
    """
    key = hashlib.sha256(json.dumps([workers, *flags]).encode()).hexdigest()[:12]
    found = setting.out / f"reference-{key}.json"
    with found.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            job = launch(setting, f"reference-{key}-{os.getpid()}", workers, flags)
            if any(job.codes):
                raise RuntimeError(f"the undisturbed job ended with {job.codes}: {job.tail()}")
            found.write_text(json.dumps(dict(job.summary.loss)))
    return {int(iteration): loss for iteration, loss in json.loads(found.read_text()).items()}
