# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests, made by the program openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from megatron_resihp.control.transport.access.encryption import CA, CERTIFICATE, KEY, Certificates

EC = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def authority(folder: Path) -> Path:
    """A folder with an authority, `ca.pem`."""
    folder.mkdir()
    openssl(folder, *EC, "-x509", "-subj", "/CN=an authority", "-keyout", "ca.key", "-out", "ca.pem")
    return folder


def sign(folder: Path, name: str = "own", *more: str) -> None:
    """A certificate of an authority, `NAME.pem`, and its key, which names no host."""
    openssl(folder, *EC, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", f"{name}.pem", *more)
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed)


def variables(folder: Path, name: str = "own", ca: Path | None = None) -> dict[str, str]:
    """What a user sets."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    return {CA: str((ca or folder) / "ca.pem"), CERTIFICATE: str(certificate), KEY: str(key)}


def certificates(folder: Path, name: str = "own", ca: Path | None = None) -> Certificates:
    return Certificates(*variables(folder, name, ca).values())
