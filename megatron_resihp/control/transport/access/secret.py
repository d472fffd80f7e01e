# SPDX-License-Identifier: Apache-2.0
"""The secret of one run: who has it belongs to the job. It never stands in arguments, logs, events or messages. With
it goes what connections are encrypted with.

Node 0's launcher makes it and leaves it in the run directory, for its owner alone to read. Where nodes share no file
system, the user gives all of them the same one in the environment. May import: the standard library,
`encryption` and `control.transport.sockets`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatron_resihp.control.transport.access.encryption import (
    CertificateError,
    Certificates,
    EncryptionError,
    certificates_of,
)
from megatron_resihp.control.transport.sockets import StoreError

VARIABLE: Final = "RESIHP_SECRET"
"""From the user to launchers and commands. Workers don't get it: their agent talks for them (`by_agent`)."""
FILE_NAME: Final = "secret"
BYTES: Final = 32
SHORTEST: Final = 16
"""Characters of a secret that a user gives."""


class UnreadableError(StoreError):
    """This process can't have the job's secret."""


@dataclass(frozen=True)
class Secret:
    """A run's secret.

    Attributes:
        source: where it comes from, for people.
        certificates: of this process, for connections to others that have the secret; None: they are not encrypted.
    """

    text: str = field(repr=False)
    source: str = field(default="this process", compare=False)
    certificates: Certificates | None = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> bytes:
        return self.text.encode()


def fresh_secret() -> Secret:
    """A secret that nobody else has."""
    return Secret(secrets.token_hex(BYTES))


@contextmanager
def published_secret(
    run_dir: Path, holds: Callable[[], bool] = lambda: True, before: Secret | None = None
) -> Iterator[Secret]:  # fmt: skip
    """A new secret, in the run directory for as long as the job runs; the user's, if the environment has one.

    Args:
        holds: whether the job is still this process's; then it removes the file in the end.
        before: the secret of a job that runs; None: it begins.

    Raises:
        OSError: the directory can't be written.
        UnreadableError: the user's is too short.
        CertificateError: the user's can't be used.
    """
    path, certificates = run_dir / FILE_NAME, given_certificates()
    given = _given(os.environ, certificates)
    if given is not None:
        # An earlier run's would be taken for this one's.
        path.unlink(missing_ok=True)
        yield given
        return
    made = before or fresh_secret()
    if before is None:
        _write(path, made.text)
    try:
        yield Secret(made.text, str(path), certificates)
    finally:
        # A job that believed this one to be dead may have the directory by now.
        with suppress(OSError):
            if path.read_text().strip() == made.text and holds():
                path.unlink()


def find_secret(run_dir: Path) -> Secret:
    """The secret of the job that runs in a directory.

    Raises:
        UnreadableError: there is none, or this process may not read it.
        CertificateError: the user's can't be used.
    """
    certificates = given_certificates()
    given = _given(os.environ, certificates)
    if given is not None:
        return given
    path = run_dir / FILE_NAME
    try:
        return Secret(path.read_text().strip(), str(path), certificates)
    except OSError as error:
        problem = f"the job's secret {path} can't be read ({error.strerror})"
        raise UnreadableError(f"{problem}; be the job's user, or give it in {VARIABLE}") from error


def is_secret_given() -> bool:
    """Whether the user has given it in the environment."""
    return bool(os.environ.get(VARIABLE, "").strip())


def given_certificates() -> Certificates | None:
    """Those that the environment names; None: none. Raises CertificateError: they can't be used."""
    try:
        return certificates_of(os.environ)
    except EncryptionError as error:
        raise CertificateError(str(error)) from error


def _given(environment: Mapping[str, str], certificates: Certificates | None) -> Secret | None:
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return None
    if len(text) < SHORTEST:
        raise UnreadableError(f"{VARIABLE} has {len(text)} characters; give {SHORTEST} or more, or leave it out")
    return Secret(text, f"the environment ({VARIABLE})", certificates)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and never readable for others; a file or link that is there is replaced."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(f"{text}\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
