# SPDX-License-Identifier: Apache-2.0
"""Where in etcd a job keeps its decisions: etcd://HOST:PORT,HOST:PORT/RUN, or with ?lease=SECONDS behind it.

Pure. May import: the standard library, `transport.address` and `access`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from megatron_resihp.control.transport.address import Address, parse_address
from megatron_resihp.control.transport.etcd.access import OPEN, Access

SCHEME: Final = "etcd://"
_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""Without slashes, so that no name is the beginning of another's keys."""
LEASE_S: Final = 10
_LEASES_S: Final = range(2, 301)
"""etcd makes shorter ones as long as its own elections, two seconds by default."""
_LEASE: Final = "?lease="


@dataclass(frozen=True)
class Location:
    """A job's place in an etcd.

    Attributes:
        members: of one cluster; any of them is asked.
        run: the name under which the job's keys are.
        access: how etcd lets the job in.
        lease_s: a coordinator that etcd has not heard of for so long may be followed by another.
    """

    members: tuple[Address, ...]
    run: str
    access: Access = OPEN
    lease_s: int = LEASE_S

    def __str__(self) -> str:
        lease = "" if self.lease_s == LEASE_S else f"{_LEASE}{self.lease_s}"
        return f"{SCHEME}{self.cluster}/{self.run}{lease}"

    @property
    def cluster(self) -> str:
        """The members, in words."""
        return ",".join(map(str, self.members))

    @property
    def leader(self) -> str:
        """The key that the leader holds."""
        return f"{self.run}/leader"

    def known(self, run: str) -> str:
        """What the keys of nodes begin with that hold leases, or have held one. `run`: the run's token."""
        return f"{self.run}/known/{run}/"

    def present(self, run: str) -> str:
        """What the keys begin with that go with nodes' leases."""
        return f"{self.run}/present/{run}/"

    def entry(self, number: int) -> str:
        """The key of an entry of the log; those of later entries are greater."""
        return f"{self.run}/log/{number:09}"

    def piece(self, number: int, index: int) -> str:
        """The key of a piece of an entry that is too large for one key."""
        return f"{self.run}/pieces/{number:09}/{index:05}"

    def before(self, number: int, run: str) -> tuple[tuple[str, str], ...]:
        """All that runs before this one have left, as of `entries`: keys of entries before this one, and of nodes.

        Args:
            run: the run's token. Some of its nodes may be known already.
        """
        nodes, own = f"{self.run}/known", self.known(run)
        return (*self.log_before(number), (f"{nodes}/", own), (f"{own[:-1]}0", f"{nodes}0"))

    def log_before(self, number: int) -> tuple[tuple[str, str], ...]:
        """The keys of all entries before this one, as of `entries`."""
        pieces = f"{self.run}/pieces/"
        return (self.entries[0], self.entry(number)), (pieces, f"{pieces}{number:09}")

    @property
    def entries(self) -> tuple[str, str]:
        """The first key that an entry may have, and one greater than all."""
        return f"{self.run}/log/", f"{self.run}/log0"

    def number_of(self, key: str) -> int | None:
        """Which entry has this key; None: none has."""
        digits = key.removeprefix(self.entries[0])
        return int(digits) if len(digits) == 9 and digits.isascii() and digits.isdigit() else None


def parse_location(text: str, access: Access = OPEN) -> Location:
    """Read etcd://HOST:PORT,HOST:PORT/RUN[?lease=SECONDS]; ValueError says what is wrong with it."""
    place, given, lease = text.partition(_LEASE)
    hosts, slash, run = place.removeprefix(SCHEME).partition("/")
    if not (text.startswith(SCHEME) and slash and hosts):
        raise ValueError(f"{text!r} is not etcd://HOST:PORT,HOST:PORT/RUN")
    if given and not (lease.isascii() and lease.isdigit() and int(lease) in _LEASES_S):
        raise ValueError(f"{text!r} has a lease that is not {_LEASES_S[0]} to {_LEASES_S[-1]} whole seconds")
    if not _RUN.fullmatch(run):
        raise ValueError(f"{text!r} names no run: after the slash come up to 200 letters, digits, dots and dashes")
    members = tuple(map(parse_address, hosts.split(",")))
    if len(set(members)) < len(members):
        raise ValueError(f"{text!r} names a member twice")
    return Location(members, run, access, int(lease) if given else LEASE_S)
