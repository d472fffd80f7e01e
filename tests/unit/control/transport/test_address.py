# SPDX-License-Identifier: Apache-2.0
"""Addresses as people write them."""

import pytest

from megatron_resihp.control.transport.address import Address, parse_address


@pytest.mark.parametrize(
    "address", [Address("node-0.cluster", 29500), Address("10.0.0.1", 1), Address("fe80::1%eth0", 65535)]
)
def test_what_is_written_can_be_read(address: Address) -> None:
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:x", "host:٣", "fe80::1:29500"]
)
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not host:port|in brackets") as refusal:
        parse_address(text)
    assert repr(text) in str(refusal.value)
