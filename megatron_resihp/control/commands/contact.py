# SPDX-License-Identifier: Apache-2.0
"""How commands reach a running job: a file in its run directory says where its store is.

May import: the standard library, `coding`, `protocol`, `control.transport` and this package's modules.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from megatron_resihp.coding import Form, Tolerance, WrongValueError, decode, encode, omitted_if
from megatron_resihp.control import keys
from megatron_resihp.control.commands.launch.claim import Hold, Owner, claimed, taken_over
from megatron_resihp.control.transport import leaders
from megatron_resihp.control.transport.access.encryption import CertificateError
from megatron_resihp.control.transport.access.gate import OtherProtocolError, RefusedSecretError
from megatron_resihp.control.transport.access.secret import UnreadableError, find_secret
from megatron_resihp.control.transport.address import Address, parse_address
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.client import connect
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.protocol.answers import ANSWERS, Answer, Refused
from megatron_resihp.protocol.messages import MESSAGES, SlowdownRequest, WordOfCommand
from megatron_resihp.protocol.wire import MalformedError

FILE_NAME: Final = leaders.FILE_NAME
CONNECT_S: Final = 5.0
ANSWER_S: Final = 90.0
"""The coordinator may be waiting for a planner (30 s), or for etcd (60 s)."""
ADDED_TO: Final = Tolerance(unknown=True)
"""The file names its owner, too; a token that was made up here is none."""


def _address(text: object) -> Address:
    try:
        return parse_address(decode(str, text))
    except ValueError as error:
        raise WrongValueError(f"is not an address: {error}") from None


@dataclass(frozen=True)
class Contact:
    """Where a job's store is, and a token that this job's store holds under messages.RUN: it tells the job from another
    that has the port by now, and is no secret.

    Attributes:
        apart: the coordinator runs on none of the job's nodes.
        replaceable: another coordinator may take its place if it is lost.
        encrypted: the job's connections are.
    """

    store: Annotated[Address, Form(str, _address)]
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    apart: bool = omitted_if(False)
    replaceable: bool = omitted_if(False)
    encrypted: bool = omitted_if(False)

    def published(self, run_dir: Path, holds: Callable[[], bool] = lambda: True) -> AbstractContextManager[None]:
        """Leave the file in the run directory for as long as the job runs.

        Args:
            holds: whether it goes in the end.

        Raises:
            ClaimedError: the directory is another job's, which runs.
            OSError: it cannot be written.
        """
        return claimed(run_dir / FILE_NAME, self._text, lambda: _answers(run_dir), holds)

    def taken_over(
        self, run_dir: Path, holds: Callable[[], bool]
    ) -> AbstractContextManager[Callable[[], None]]:  # fmt: skip
        """As `published`, in the place of a coordinator that was lost, from when what it gives is called."""
        return taken_over(run_dir / FILE_NAME, self._text, holds)

    def holds(self, run_dir: Path) -> bool:
        """Whether the run directory is still this coordinator's."""
        try:
            return read_contact(run_dir) == self
        except StoreError:
            return False

    def is_followed(self, run_dir: Path) -> bool:
        """Whether another coordinator has the run directory, of the same run."""
        try:
            there = read_contact(run_dir)
        except StoreError:
            return False
        return there.token == self.token and there.store != self.store

    def hold(self, run_dir: Path) -> Hold:
        """What this coordinator has of the run directory."""
        return Hold(partial(self.holds, run_dir), partial(self.is_followed, run_dir))

    @property
    def _text(self) -> str:
        return json.dumps({**encode(self), **encode(Owner.this())}) + "\n"


def _answers(run_dir: Path) -> bool:
    try:
        reach(run_dir).close()
    except CertificateError:
        return True  # this process may not talk to whoever is there
    except StoreError:
        return False
    return True


def read_contact(run_dir: Path) -> Contact:
    """What the file in a run directory says; a job that was killed leaves its own.

    Raises:
        StoreError: there is none.
    """
    try:
        contact: Contact = decode(Contact, json.loads((run_dir / FILE_NAME).read_text()), ADDED_TO)
    except (OSError, ValueError, WrongValueError) as error:
        lacking = None if run_dir.exists() else f"{run_dir} does not exist; give the run directory of a job that runs"
        raise StoreError(lacking or f"no job runs in {run_dir}") from error
    return contact


def reach(run_dir: Path) -> Store:
    """Connect to the store of the job that runs in a directory.

    Raises:
        StoreError: if none does.
    """
    contact = read_contact(run_dir)
    try:
        store = connect(contact.store, find_secret(run_dir), CONNECT_S)
        # A job that was killed leaves its file behind, and another may have its port by now.
        if store.get(keys.RUN, CONNECT_S) == contact.token:
            return store
    except RefusedSecretError as error:
        raise StoreError(f"no job runs in {run_dir} that this command may speak to: {error}") from error
    except (UnreadableError, OtherProtocolError, CertificateError):
        raise
    except (StoreError, TimeoutError):
        pass
    why = f"it has ended, is still starting, or can't be reached from here at {contact.store}"
    raise StoreError(f"no job runs in {run_dir}, or none that answers: {why}")


def ask(store: Store, request: WordOfCommand | SlowdownRequest, sender: str) -> Answer:
    """Send the coordinator a request and wait for its answer.

    Args:
        sender: the command that asks.

    Raises:
        TimeoutError: it does not answer.
        StoreError: it is gone, or answers in another version of the protocol.
    """
    key = f"{keys.ANSWERS}{secrets.token_hex(8)}"
    store.push(keys.INBOX, MESSAGES.write(replace(request, answer=key), sender))
    try:
        answer = ANSWERS.read(store.get(key, ANSWER_S)).body
    except TimeoutError:
        said = f"the coordinator did not answer within {ANSWER_S:g} s; it may still do what was asked"
        raise TimeoutError(said) from None
    except MalformedError as error:
        raise StoreError(str(error)) from None
    store.delete(key)
    return answer


def settle(run_dir: Path, request: WordOfCommand, sender: str) -> int:
    """Ask the job that runs in a directory, and say what it answers; the exit code is 0, or 2 if nothing changes."""
    try:
        answer = ask(reach(run_dir), request, sender)
    except (StoreError, TimeoutError) as error:
        answer = Refused(str(error))
    return say(answer)


def say(answer: Answer) -> int:
    """Say what the coordinator has answered; the exit code is 0, or 2 if nothing changes."""
    if isinstance(answer, Refused):
        print(f"resihp: {answer.reason}", file=sys.stderr)
        return 2
    for line in answer.changes:
        print(f"  {line}")
    print(f"resihp: {answer.line}")
    return 0
