# SPDX-License-Identifier: Apache-2.0
"""IterationRecord ↔ one compact message. Imports numpy and the standard library.

A message is a header, then the record's four arrays as they lie in memory (little endian). The record of a worker in
the middle of a pipeline with 8 micro-batches (16 ops, 32 transfers, 5 spans) takes 1729 bytes.
"""

import struct
import zlib
from enum import StrEnum
from typing import Final

import numpy as np

from megatron_resihp.detector.input.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord

VERSION: Final = 1
_MAGIC = b"RIHP"
_PREFIX = struct.Struct("<4sBxxxI")
"""Magic, version, CRC-32 of all that follows."""
_HEADER = struct.Struct("<IIIIddIIII")
"""Epoch, iteration, worker, lost, start, end, numbers of ops, transfers, workload entries and spans."""
_BODY = _PREFIX.size + _HEADER.size
_PARTS = tuple(part.newbyteorder("<") for part in (OP, TRANSFER, WORKLOAD, SPAN))


class Fault(StrEnum):
    """What is wrong with a message."""

    TRUNCATED = "truncated"
    FOREIGN = "foreign"
    VERSION = "version"
    DAMAGED = "damaged"


class WireError(ValueError):
    """The bytes are no message; `fault` says why."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(f"{fault} record: {detail}")
        self.fault = fault


def pack(record: IterationRecord) -> bytes:
    """The record as one message."""
    arrays = (record.ops, record.transfers, record.workload, record.spans)
    header = _HEADER.pack(
        record.epoch, record.iteration, record.worker, record.lost, record.start, record.end, *map(len, arrays)
    )
    parts = [array.astype(part, copy=False).tobytes() for array, part in zip(arrays, _PARTS, strict=True)]
    body = b"".join([header, *parts])
    return _PREFIX.pack(_MAGIC, VERSION, zlib.crc32(body)) + body


def unpack(message: bytes) -> IterationRecord:
    """Reverse `pack`; the record's arrays are read-only views of the message.

    Raises:
        WireError: the bytes are cut short, damaged, from another version or not a record at all.
    """
    if len(message) < _BODY:
        raise WireError(Fault.TRUNCATED, f"{len(message)} bytes are less than a header")
    magic, version, checksum = _PREFIX.unpack_from(message)
    if magic != _MAGIC:
        raise WireError(Fault.FOREIGN, "it does not begin as a record does")
    if version != VERSION:
        raise WireError(Fault.VERSION, f"version {version}, this is version {VERSION}")
    epoch, iteration, worker, lost, start, end, *counts = _HEADER.unpack_from(message, _PREFIX.size)
    size = _BODY + sum(count * part.itemsize for count, part in zip(counts, _PARTS, strict=True))
    if len(message) < size:
        raise WireError(Fault.TRUNCATED, f"{len(message)} of {size} bytes")
    if len(message) > size or zlib.crc32(memoryview(message)[_PREFIX.size :]) != checksum:
        raise WireError(Fault.DAMAGED, "the checksum does not fit")
    arrays, offset = [], _BODY
    for count, part in zip(counts, _PARTS, strict=True):
        arrays.append(np.frombuffer(message, part, count, offset))
        offset += count * part.itemsize
    return IterationRecord(epoch, iteration, worker, lost, start, end, *arrays)
