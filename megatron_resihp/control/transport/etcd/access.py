# SPDX-License-Identifier: Apache-2.0
"""How etcd lets a job in: TLS, a client's certificate, a user. As etcdctl's own environment variables say.

May import: the standard library.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

PREFIX: Final = "ETCDCTL_"
"""With which the names of these variables begin."""
CA: Final = f"{PREFIX}CACERT"
CERTIFICATE: Final = f"{PREFIX}CERT"
KEY: Final = f"{PREFIX}KEY"
USER: Final = f"{PREFIX}USER"
PASSWORD: Final = f"{PREFIX}PASSWORD"


@dataclass(frozen=True)
class Access:
    """What a client of etcd shows, and what it expects of etcd's members.

    Attributes:
        ca: file of the authorities that members' certificates must come from; None: without TLS.
        certificate, key: files of the client's own; None: it has none.
        user: None: etcd asks for none.
        password: of the user.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def context(self) -> ssl.SSLContext | None:
        """What connections to members are made with; None: without TLS.

        Raises:
            ValueError: a file can't be read; the text names the variable.
        """
        if self.ca is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise ValueError(f"{CA}={self.ca} can't be used ({error.strerror or error})") from error
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key)
            except OSError as error:
                named = f"{CERTIFICATE}={self.certificate} with {KEY}={self.key}"
                raise ValueError(f"{named} can't be used ({error.strerror or error})") from error
        return context


OPEN: Final = Access()
"""Without TLS and a user."""


def access_of(environment: Mapping[str, str]) -> Access:
    """What etcdctl's variables say; ValueError if they don't fit together."""
    ca, certificate, key = (environment.get(name) or None for name in (CA, CERTIFICATE, KEY))
    if (certificate is None) != (key is None):
        raise ValueError(f"{CERTIFICATE} and {KEY} belong together; set both, or none")
    if certificate is not None and ca is None:
        raise ValueError(f"{CERTIFICATE} needs {CA}: the file of the authorities that etcd's certificates come from")
    user, colon, password = (environment.get(USER) or "").partition(":")
    if not colon:
        password = environment.get(PASSWORD, "")
    if user and not password:
        raise ValueError(f"{USER} has no password; set {USER}=NAME:PASSWORD, or {PASSWORD}")
    return Access(ca, certificate, key, user or None, password if user else None)
