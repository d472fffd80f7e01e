# SPDX-License-Identifier: Apache-2.0
"""Records survive the wire bit by bit, and bytes that are no record are named errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.detector.input.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord
from megatron_resihp.detector.input.wire import Fault, WireError, pack, unpack


def record(seed: int = 0, micro_batches: int = 8) -> IterationRecord:
    """A record in the middle of a pipeline, full of arbitrary bits."""
    random = np.random.default_rng(seed)
    sizes = {OP: 2 * micro_batches, TRANSFER: 4 * micro_batches, WORKLOAD: micro_batches, SPAN: 5}
    arrays = [np.frombuffer(random.bytes(size * part.itemsize), part) for part, size in sizes.items()]
    return IterationRecord(3, 1234, 17, 2, 5.5, 6.25, *arrays)


@given(st.integers(0, 1000), st.integers(0, 40))
def test_a_record_comes_out_as_it_went_in(seed: int, micro_batches: int) -> None:
    sent = record(seed, micro_batches)
    got = unpack(pack(sent))
    assert (got.epoch, got.iteration, got.worker, got.lost) == (3, 1234, 17, 2)
    assert (got.start, got.end) == (5.5, 6.25)
    for name in ("ops", "transfers", "workload", "spans"):
        assert getattr(got, name).tobytes() == getattr(sent, name).tobytes()
        assert getattr(got, name).dtype == getattr(sent, name).dtype


def test_a_message_is_compact() -> None:
    assert len(pack(record(micro_batches=8))) == 1729


@given(st.integers(0, 1728))
def test_a_cut_message_is_named(length: int) -> None:
    with pytest.raises(WireError) as caught:
        unpack(pack(record())[:length])
    assert caught.value.fault == Fault.TRUNCATED


@given(st.integers(9, 1728), st.integers(1, 255))
def test_a_flipped_bit_is_never_taken_for_a_measurement(place: int, flip: int) -> None:
    message = bytearray(pack(record()))
    message[place] ^= flip
    with pytest.raises(WireError) as caught:
        unpack(bytes(message))
    assert caught.value.fault in (Fault.DAMAGED, Fault.TRUNCATED)


@given(st.binary(max_size=3000))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(WireError):
        unpack(noise)


def test_another_version_is_named() -> None:
    message = bytearray(pack(record()))
    message[4] = 9
    with pytest.raises(WireError, match="version 9, this is version 1") as caught:
        unpack(bytes(message))
    assert caught.value.fault == Fault.VERSION


def test_something_else_is_foreign() -> None:
    with pytest.raises(WireError) as caught:
        unpack(b"GET / HTTP/1.1\r\n" * 8)
    assert caught.value.fault == Fault.FOREIGN
