# SPDX-License-Identifier: Apache-2.0
"""What the store's client asks its server, and what that answers, as bytes. Pure. May import: the standard library."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

PURPOSE: Final = "store"
MAX_VALUE_BYTES: Final = 8 * 1024 * 1024
MAX_KEY_BYTES: Final = 64 * 1024
MAX_FIELDS: Final = 4096
LARGEST: Final = MAX_VALUE_BYTES + 2 * MAX_KEY_BYTES
"""Bytes of a request or an answer."""

HEAD: Final = struct.Struct(">BdH")
SIZE: Final = struct.Struct(">I")
NUMBER: Final = struct.Struct(">Q")
LONGEST_WAIT_S: Final = 24 * 3600.0


class Op(IntEnum):
    """What is asked for, and with which fields. What may take until something comes ends after the request's time."""

    SET = 1
    """keys and values, in turns"""
    GET = 2
    """key → value, when it comes"""
    WAIT = 3
    """key → when it comes"""
    CHECK = 4
    """keys → whether all are there"""
    COMPARE_SET = 5
    """key, expected, desired → what is stored afterwards"""
    ADD = 6
    """key, amount → the sum"""
    PUSH = 7
    """queue, value"""
    TAKE = 8
    """queue → its values, when any come; no more than fit into an answer"""
    DELETE = 9
    """key → whether it was there"""
    COUNT = 10
    """→ how many keys there are"""
    DELETE_ALL = 11
    """what the keys begin with"""
    REACH = 12
    """→ when the store has answered; from an agent with where that is, or why it can't be reached (`by_agent`)"""
    RELAY = 13
    """number, request → number, answer. An agent asks so what its workers ask, and more before the answer comes."""
    DROP = 14
    """number: nobody waits for the answer under this number any more. There is no answer to this."""


class Said(IntEnum):
    """How an answer begins."""

    YES = 1
    """With the value, where there is one."""
    NO = 2
    """It is not there, or did not come in time."""
    WRONG = 3
    """It can't be done; with the reason."""


@dataclass(frozen=True)
class Request:
    op: Op
    fields: tuple[bytes, ...] = ()
    within_s: float = 0.0


@dataclass(frozen=True)
class Reply:
    said: Said
    value: bytes = b""


class MalformedRequestError(ValueError):
    """Bytes that are no request."""


FIELDS: Final = {
    Op.GET: 1, Op.WAIT: 1, Op.COMPARE_SET: 3, Op.ADD: 2, Op.PUSH: 2, Op.TAKE: 1, Op.DELETE: 1, Op.COUNT: 0,
    Op.DELETE_ALL: 1, Op.REACH: 0, Op.RELAY: 2, Op.DROP: 1,
}  # fmt: skip
"""How many fields a request has, but for CHECK and SET."""


def write_request(request: Request) -> bytes:
    parts = [HEAD.pack(request.op, request.within_s, len(request.fields))]
    for each in request.fields:
        parts += [SIZE.pack(len(each)), each]
    return b"".join(parts)


def read_request(data: bytes) -> Request:
    """Raises MalformedRequestError."""
    try:
        number, within_s, count = HEAD.unpack_from(data)
        op = Op(number)
        if count > MAX_FIELDS or FIELDS.get(op, count) != count or (op is Op.SET and count % 2):
            raise MalformedRequestError(f"{op.name} with {count} fields")
        fields, at = [], HEAD.size
        for _ in range(count):
            (size,) = SIZE.unpack_from(data, at)
            fields.append(data[at + SIZE.size : at + SIZE.size + size])
            at += SIZE.size + size
    except (struct.error, ValueError) as error:
        raise MalformedRequestError(str(error)) from None
    if at != len(data) or not 0.0 <= within_s < float("inf"):
        raise MalformedRequestError(f"{op.name} that is cut or too long")
    return Request(op, tuple(fields), within_s)


def write_values(values: Iterable[bytes]) -> bytes:
    """Several values as that of one answer."""
    return b"".join(part for each in values for part in (SIZE.pack(len(each)), each))


def read_values(data: bytes) -> list[bytes]:
    """Raises MalformedRequestError."""
    values, at = [], 0
    try:
        while at < len(data):
            (size,) = SIZE.unpack_from(data, at)
            at += SIZE.size + size
            values.append(data[at - size : at])
    except struct.error as error:
        raise MalformedRequestError(str(error)) from None
    if at != len(data):
        raise MalformedRequestError("values that are cut")
    return values


def write_reply(reply: Reply) -> bytes:
    return bytes((reply.said,)) + reply.value


def read_reply(data: bytes) -> Reply:
    """Raises MalformedRequestError."""
    try:
        return Reply(Said(data[0]), data[1:])
    except (IndexError, ValueError) as error:
        raise MalformedRequestError(str(error)) from None


def relayed(number: int, request: Request) -> Request:
    """A request under a number."""
    return Request(Op.RELAY, (NUMBER.pack(number), write_request(request)))


def dropped(number: int) -> Request:
    """That nobody waits for the answer under this number any more."""
    return Request(Op.DROP, (NUMBER.pack(number),))


def read_number(request: Request) -> int:
    """Of RELAY or DROP. Raises MalformedRequestError."""
    try:
        (number,) = NUMBER.unpack(request.fields[0])
    except struct.error as error:
        raise MalformedRequestError(str(error)) from None
    assert isinstance(number, int)
    return number


def read_relayed(request: Request) -> Request:
    """What is asked under a number. Raises MalformedRequestError."""
    inner = read_request(request.fields[1])
    if inner.op in (Op.RELAY, Op.DROP):
        raise MalformedRequestError(f"{inner.op.name} under a number")
    return inner


def write_numbered(number: int, reply: Reply) -> Reply:
    """The answer under a number."""
    return Reply(Said.YES, NUMBER.pack(number) + write_reply(reply))


def read_numbered(reply: Reply) -> tuple[int, Reply]:
    """Raises MalformedRequestError."""
    try:
        (number,) = NUMBER.unpack_from(reply.value)
    except struct.error as error:
        raise MalformedRequestError(str(error)) from None
    return number, read_reply(reply.value[NUMBER.size :])
