# SPDX-License-Identifier: Apache-2.0
"""Whether a worker was started as the job was: compares what would make it compute something else.

The first worker of the job leaves a digest of what it was started with in the store, and the whole of it beside; every
other one compares. May import: the standard library and this package's modules.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from megatron_resihp.control import keys
from megatron_resihp.control.transport.store.store import Store

Settings = Mapping[str, Any]
"""Settings by the name that users know, such as a flag or a package. Values are plain, as in JSON."""

READ_S: Final = 60.0
"""What the first worker was started with is written a moment after its digest."""
NAMED: Final = 8
"""How many differences are named; of more, only the number is told."""
LONGEST: Final = 120
"""The longest value in a message, in characters."""


class UnlikeError(Exception):
    """This worker would not train what the job trains; the message is "differences; mend"."""


@dataclass(frozen=True)
class Identity:
    """What a worker was started with.

    Attributes:
        always: what has to be the same on every worker.
        at_start: what has to be the same on those that begin the job: others take no part in what it decides.
        in_step: what all workers have to do at the same moments; a worker that differs takes the job's.
    """

    always: Settings
    at_start: Settings
    in_step: Settings


def check_in(store: Store, own: Identity, joining: bool) -> Settings:
    """Compare with the job's first worker, or be that one; returns what that one has `in_step`.

    Args:
        joining: this worker was not there when the job began.

    Raises:
        UnlikeError: it differs.
        TimeoutError: the first worker died before it had written what it was started with.
    """
    text = json.dumps(asdict(own), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if joining:
        # Which is there, or comes with the first worker that finds a coordinator which has taken over.
        job = store.get(keys.IDENTITY, READ_S)
    else:
        job = store.set_once(keys.IDENTITY, digest)
        # One of thousands of like workers writes it.
        if store.add(f"{keys.IDENTITY}/{digest}/workers", 1) == 1:
            store.set(f"{keys.IDENTITY}/{digest}", text)
    if job == digest:
        return own.in_step
    told = Identity(**json.loads(store.get(f"{keys.IDENTITY}/{job}", READ_S)))
    mine = Identity(**json.loads(text))
    unlike = differences(mine.always, told.always)
    if not joining:
        unlike += differences(mine.at_start, told.at_start)
    if unlike:
        more = f" and {len(unlike) - NAMED} more" if len(unlike) > NAMED else ""
        raise UnlikeError(
            f"this worker differs from the job: {', '.join(unlike[:NAMED])}{more}; start it with what "
            "the job was started with"
        )
    return told.in_step


def identity_of_job(store: Store) -> dict[str, str]:
    """What is in the store of what the job's first worker was started with; to be asked for after `check_in`.

    Raises:
        TimeoutError: that one died before it had written it.
    """
    job = store.get(keys.IDENTITY, READ_S)
    return {f"{keys.IDENTITY}/{job}": store.get(f"{keys.IDENTITY}/{job}", READ_S), keys.IDENTITY: job}


def differences(own: Settings, job: Settings) -> list[str]:
    """How this worker's settings differ from the job's, each difference in a few words."""
    # As text, because NaN is not itself.
    unlike = [name for name in sorted({*own, *job}) if json.dumps(own.get(name)) != json.dumps(job.get(name))]
    told = []
    for name in unlike:
        mine, theirs = own.get(name), job.get(name)
        if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
            pairs = [pair for pair in zip(mine, theirs, strict=True) if pair[0] != pair[1]]
            mine, theirs = [one for one, _ in pairs], [other for _, other in pairs]
        told.append(f"{name} {_said(mine)} (the job's: {_said(theirs)})")
    return told


def _said(value: Any) -> str:
    if isinstance(value, list):
        text = " ".join(map(_said, value))
    else:
        text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
