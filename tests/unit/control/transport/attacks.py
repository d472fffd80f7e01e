# SPDX-License-Identifier: Apache-2.0
"""What strangers would say at a job's ports if they were heard: forged orders, stolen messages, floods."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final

from protocol_examples import PLAN

from megatron_resihp.control import keys
from megatron_resihp.control.transport.access.secret import Secret
from megatron_resihp.control.transport.access.secure import (
    ANSWER_BYTES,
    HELLO_BYTES,
    LENGTH,
    Answer,
    Challenge,
    Session,
)
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.store.wire import LARGEST, PURPOSE, Op, Request, write_request
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.protocol.messages import (
    MESSAGES,
    EndRequest,
    Message,
    PlanRequest,
    ProcessExited,
    ScriptFailed,
    SlowdownRequest,
    StopRequest,
)
from megatron_resihp.protocol.notices import NOTICES, JobEnds, WorkersGivenUp
from megatron_resihp.protocol.published import DECISIONS, END, EpochPlan, JobEnd
from megatron_resihp.protocol.wire import COORDINATOR

STALE: Final = Secret("an earlier run's secret")
NEXT_EPOCH: Final = 1
FORGED: Final = ParallelPlan.from_dict(PLAN)


def _told(message: Message) -> Request:
    return Request(Op.PUSH, (keys.INBOX.encode(), MESSAGES.write(message, "agent 0").encode()))


def _set(key: str, text: str) -> Request:
    return Request(Op.SET, (key.encode(), text.encode()))


REQUESTS: Final = {
    "a forged end": _set(keys.END, END.write(JobEnd(0, "finished", 1.0), COORDINATOR)),
    "a forged notice of the end": _set(keys.notice_key(0), NOTICES.write(JobEnds(0, "finished"), COORDINATOR)),
    "a forged death notice": _set(keys.notice_key(0), NOTICES.write(WorkersGivenUp((0,), "forged"), COORDINATOR)),
    "a garbage notice": _set(keys.notice_key(0), "garbage"),
    "a forged exit": _told(ProcessExited(0, -9, 1.0)),
    "a forged failure": _told(ScriptFailed(0, "forged", 1)),
    "a forged signal": _told(StopRequest(15, 1.0)),
    "a forged stop": _told(EndRequest(False, "answer/forged")),
    "a forged apply": _told(PlanRequest(FORGED.to_dict(), "forged", answer="answer/forged")),
    "a forged slowdown": _told(SlowdownRequest((0,), 0.1, answer="answer/forged")),
    "the next plan in advance": _set(
        keys.plan_key(NEXT_EPOCH), DECISIONS.write(EpochPlan(NEXT_EPOCH, FORGED, None), COORDINATOR)
    ),
    "a value where a queue is": _set(keys.INBOX, "a plain value"),
    "a message stolen from the inbox": Request(Op.TAKE, (keys.INBOX.encode(),)),
    "all keys deleted": Request(Op.DELETE_ALL, (b"",)),
    "an endless key": Request(Op.SET, (b"k" * LARGEST, b"")),
    "a huge value": Request(Op.SET, (b"huge", b"v" * LARGEST)),
}
"""Each would do harm, or cost memory, if the server carried it out."""


def plainly(request: Request) -> Iterator[bytes]:
    """What a stranger without a secret sends: the request as it is, and as a frame, at once and after an answer."""
    said = write_request(request)
    frame = LENGTH.pack(len(said)) + said + bytes(16)
    yield said.ljust(ANSWER_BYTES, b"\0")
    yield frame.ljust(ANSWER_BYTES, b"\0")
    yield bytes(ANSWER_BYTES) + frame


def with_a_stale_secret(address: Address, request: Request, timeout_s: float) -> socket.socket:
    """Answer the challenge with an old run's secret, and send the sealed request whatever the server says to that."""
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        with sock.makefile("rb") as heard:
            hello = heard.read(HELLO_BYTES)
        if len(hello) < HELLO_BYTES:
            raise ConnectionResetError("turned away")
        answer = Answer(STALE.key, PURPOSE, LARGEST).to(hello)
        sock.sendall(answer + _stale_session().seal(write_request(request)))
    except BaseException:
        sock.close()
        raise
    return sock


def _stale_session() -> Session:
    """The client's end of a connection that the old run has let in."""
    challenge, answer = Challenge(STALE.key, PURPOSE, LARGEST), Answer(STALE.key, PURPOSE, LARGEST)
    word, _ = challenge.judge(answer.to(challenge.hello))
    return answer.welcomed(word)
