# SPDX-License-Identifier: Apache-2.0
"""Both ends prove that they have the secret, and what is forged, repeated or moved afterwards is refused."""

from __future__ import annotations

import pytest

from megatron_resihp.control.transport.access.secure import (
    ANSWER_BYTES,
    HELLO_BYTES,
    LENGTH,
    REFUSAL,
    SEAL,
    Answer,
    Challenge,
    ForeignError,
    ForgedError,
    OtherVersionError,
    RefusedError,
    Session,
)
from megatron_resihp.protocol.version import MAJOR

KEY, OTHER = b"the secret", b"another secret"
LARGEST = 1000


def met(purpose: str = "store", who: int = 7) -> tuple[Session, Session]:
    """Server's and client's end of a connection."""
    challenge, answer = Challenge(KEY, purpose, LARGEST), Answer(KEY, purpose, LARGEST, who)
    word, session = challenge.judge(answer.to(challenge.hello))
    assert session is not None
    return session, answer.welcomed(word)


def test_both_ends_with_the_secret_understand_each_other() -> None:
    server, client = met()
    assert server.who == 7
    messages = [b"", b"one", b"x" * LARGEST]
    stream = b"".join(client.seal(message) for message in messages)
    assert [m for byte in range(0, len(stream), 5) for m in server.feed(stream[byte : byte + 5])] == messages
    assert list(client.feed(server.seal(b"answer"))) == [b"answer"]


def test_a_client_with_another_secret_is_refused_and_hears_so() -> None:
    challenge, answer = Challenge(KEY, "store", LARGEST), Answer(OTHER, "store", LARGEST)
    word, session = challenge.judge(answer.to(challenge.hello))
    assert (word, session) == (REFUSAL, None)
    with pytest.raises(RefusedError, match="refuses the secret"):
        answer.welcomed(word)


def test_a_server_with_another_secret_is_refused() -> None:
    challenge, answer = Challenge(OTHER, "store", LARGEST), Answer(KEY, "store", LARGEST)
    answer.to(challenge.hello)
    for word in (bytes(len(REFUSAL)), challenge.judge(bytes(ANSWER_BYTES))[0]):
        with pytest.raises(RefusedError):
            answer.welcomed(word)


def test_a_server_that_sends_the_clients_own_proof_back_is_refused() -> None:
    answer = Answer(KEY, "store", LARGEST)
    said = answer.to(Challenge(KEY, "store", LARGEST).hello)
    with pytest.raises(RefusedError, match="does not know the secret"):
        answer.welcomed(said[-len(REFUSAL) :])


def test_another_program_is_no_server() -> None:
    with pytest.raises(ForeignError, match="not a coordinator"):
        Answer(KEY, "store", LARGEST).to(b"HTTP/1.1 400 Bad Request".ljust(HELLO_BYTES))


def test_a_server_of_another_version_is_named_and_told_nothing() -> None:
    with pytest.raises(
        OtherVersionError, match=rf"speaks protocol '1', this process {MAJOR}; give all nodes.* the same"
    ):
        Answer(KEY, "store", LARGEST).to(b"resihp/1".ljust(HELLO_BYTES))


@pytest.mark.parametrize("place", [0, 40, ANSWER_BYTES - 1], ids=["nonce", "who or proof", "proof"])
def test_an_answer_that_was_changed_on_the_way_is_refused(place: int) -> None:
    challenge, answer = Challenge(KEY, "store", LARGEST), Answer(KEY, "store", LARGEST, who=1)
    said = bytearray(answer.to(challenge.hello))
    said[place] ^= 1
    assert challenge.judge(bytes(said)) == (REFUSAL, None)


def test_what_was_heard_on_another_connection_is_of_no_use() -> None:
    first, answer = Challenge(KEY, "store", LARGEST), Answer(KEY, "store", LARGEST)
    said = answer.to(first.hello)
    assert first.judge(said)[1] is not None
    assert Challenge(KEY, "store", LARGEST).judge(said) == (REFUSAL, None), "a second greeting"
    other = Challenge(KEY, "liveness", LARGEST)
    assert other.judge(Answer(KEY, "store", LARGEST).to(other.hello)) == (REFUSAL, None), "another purpose"
    frame = met()[1].seal(b"message")
    with pytest.raises(ForgedError):
        list(met()[0].feed(frame))


def refused(server: Session, frames: bytes) -> list[bytes]:
    """Feed a server what was made of its client's frames; what it took before it refused."""
    taken: list[bytes] = []
    with pytest.raises(ForgedError):
        for message in server.feed(frames):
            taken.append(message)
    return taken


def test_frames_that_are_forged_repeated_or_moved_are_refused() -> None:
    for make, taken in (
        (lambda one, two: one + one, [b"one"]),  # repeated
        (lambda one, two: two + one, []),  # moved
        (lambda one, two: two, []),  # left out
        (lambda one, two: one[:-1] + bytes([one[-1] ^ 1]), []),  # another seal
        (lambda one, two: one[:4] + b"ONE" + one[7:], []),  # another message
        (lambda one, two: LENGTH.pack(2) + one[4:6] + one[7:] + one[6:7], []),  # another length
        (lambda one, two: LENGTH.pack(3) + b"own" + bytes(SEAL), []),  # made up
    ):
        server, client = met()
        one, two = client.seal(b"one"), client.seal(b"two")
        assert refused(server, make(one, two)) == taken


def test_a_frame_of_the_other_direction_is_refused() -> None:
    server, _ = met()
    with pytest.raises(ForgedError):
        list(server.feed(server.seal(b"own")))


def test_a_length_that_no_message_has_is_refused_at_once() -> None:
    server, _ = met()
    with pytest.raises(ForgedError, match="1001 bytes"):
        list(server.feed(LENGTH.pack(LARGEST + 1)))
