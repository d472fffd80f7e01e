# SPDX-License-Identifier: Apache-2.0
"""A job's processes write into its store. What is malformed there is told of, a line each, and changes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from jobs import Jobs, check_training, tiny
from protocol_examples import PUBLISHED, TOLD
from protocol_instances import malformed

from megatron_resihp.control import keys
from megatron_resihp.control.commands.contact import reach
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.protocol.messages import MESSAGES
from megatron_resihp.protocol.published import END, JobEnd

LAYOUT: dict[str, Any] = {"train_iters": 60}
"""Two replicas of one worker each, that train for long enough."""


@pytest.mark.nightly
def test_a_running_job_trains_on_and_recovers(jobs: Jobs) -> None:
    to_coordinator = [text for message in TOLD for text in malformed(MESSAGES, message, "a stranger")]
    notices = [text for kinds, notice in PUBLISHED for text in malformed(kinds, notice, "a stranger")]
    ends = list(malformed(END, JobEnd(0, "finished", 1.0), "a stranger"))
    job = jobs.start(tiny(**LAYOUT), workers=2)
    job.await_event("iteration", iteration=2)
    store = reach(job.run_dir)
    for text in to_coordinator:
        store.push(keys.INBOX, text)
    numbers = count()
    for text in notices:
        _publish(store, numbers, text)
    for text in ends:
        store.set(keys.END, text)
    assert job.code is None, "it is to train while the last of them come"
    os.kill(job.worker_pids()[1], signal.SIGKILL)
    check_training(job.wait(), jobs.reference(tiny(**LAYOUT), workers=2))
    assert [event["dead"] for event in job.events("worker_dead")] == [1], job.tails()
    assert len(job.events("message_dropped")) == len(to_coordinator) > 200
    assert job.log(0).count("worker 0 drops a malformed notice") == len(notices) > 50
    assert job.output().count("drops a malformed notice") == len(notices), job.tails()


def _publish(store: Store, numbers: Iterator[int], text: str) -> None:
    """Under the first free number, which nobody takes in between."""
    while store.set_once(keys.notice_key(next(numbers)), text) != text:
        pass
