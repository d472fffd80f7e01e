# SPDX-License-Identifier: Apache-2.0
"""A real etcd that lets in only those who have a certificate, or a user's password."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from authority import authority, openssl, sign
from etcds import Etcd, needs_etcd

from megatron_resihp.cli import main
from megatron_resihp.control.transport.etcd.access import CA, CERTIFICATE, KEY, OPEN, Access
from megatron_resihp.control.transport.etcd.gateway import EtcdError, Gateway, UnreachableError
from megatron_resihp.control.transport.etcd.leadership import Leadership

pytestmark = [needs_etcd, pytest.mark.nightly]

PAIR = Access(user="job", password="of:two")


def etcds_authority(folder: Path) -> Path:
    """A folder with an authority, and a certificate of 127.0.0.1 that it has signed."""
    authority(folder)
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    sign(folder, "own", "-extfile", "names")
    return folder


def access_in(folder: Path) -> Access:
    return Access(str(folder / "ca.pem"), str(folder / "own.pem"), str(folder / "own.key"))


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """Talks TLS, with those that show a certificate of its authority."""
    folder = tmp_path_factory.mktemp("etcd")
    access = access_in(etcds_authority(folder / "own"))
    flags = ["--cert-file", access.certificate, "--key-file", access.key, "--trusted-ca-file", access.ca]
    with closing(Etcd(folder, access=access, flags=[*flags, "--client-cert-auth"])) as made:
        yield made


class TestCertificates:
    def test_whoever_shows_one_leads(self, sealed: Etcd) -> None:
        with closing(Leadership(sealed.location("leads"))) as leader:
            assert leader.token

    def test_others_are_not_let_in(self, sealed: Etcd, tmp_path: Path) -> None:
        place, strangers = sealed.location("alone"), access_in(etcds_authority(tmp_path / "strangers"))
        for access in (OPEN, Access(place.access.ca), replace(strangers, ca=place.access.ca)):
            with pytest.raises(UnreachableError):
                Gateway(replace(place, access=access)).get("any")

    def test_a_member_of_another_authority_is_told_nothing(self, sealed: Etcd, tmp_path: Path) -> None:
        strangers = access_in(etcds_authority(tmp_path / "strangers"))
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            Gateway(replace(sealed.location(), access=strangers)).get("any")

    def test_commands_take_what_etcdctl_takes(
        self, sealed: Etcd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        place = sealed.location("nothing")
        monkeypatch.setenv(CA, place.access.ca or "")
        monkeypatch.setenv(CERTIFICATE, place.access.certificate or "")
        assert main(["replay", str(place)]) == 2
        assert f"{CERTIFICATE} and {KEY} belong together" in capsys.readouterr().err
        monkeypatch.setenv(KEY, place.access.key or "")
        assert main(["replay", str(place)]) == 2
        assert f"{place} holds no decisions" in capsys.readouterr().err


def administer(etcd: Etcd, *commands: str) -> None:
    """Have etcdctl do this."""
    [member] = etcd.location().members
    for command in commands:
        words = ["etcdctl", f"--endpoints={member}", *command.split()]
        subprocess.run(words, input=f"{PAIR.password}\n", text=True, check=True, capture_output=True)


def guard(etcd: Etcd) -> None:
    """Let in two users: root, and one that may use the keys of one job."""
    administer(
        etcd, "user add root:x", "user grant-role root root", "role add job",
        "role grant-permission --prefix job readwrite run/", f"user add {PAIR.user} --interactive=false",
        f"user grant-role {PAIR.user} job", "auth enable",
    )  # fmt: skip
    etcd.access = PAIR


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with closing(Etcd(tmp_path_factory.mktemp("etcd"))) as made:
        guard(made)
        yield made


class TestUsers:
    def test_one_that_may_leads(self, guarded: Etcd) -> None:
        with closing(Leadership(guarded.location("run"))) as leader:
            assert leader.token

    def test_one_that_may_not_is_refused(self, guarded: Etcd) -> None:
        with pytest.raises(EtcdError, match="permission denied"):
            Leadership(guarded.location("other"))

    @pytest.mark.parametrize(
        ("access", "said"), [(OPEN, "user name is empty"), (replace(PAIR, password="y"), "invalid user ID or password")]
    )
    def test_strangers_are_refused(self, guarded: Etcd, access: Access, said: str) -> None:
        with pytest.raises(EtcdError, match=said):
            Leadership(replace(guarded.location("run"), access=access))

    def test_a_signed_token_is_asked_for_again_once_users_have_changed(self, tmp_path: Path) -> None:
        openssl(tmp_path, "genrsa", "-out", "own.key", "2048")
        openssl(tmp_path, "rsa", "-in", "own.key", "-pubout", "-out", "own.pub")
        keys = f"pub-key={tmp_path / 'own.pub'},priv-key={tmp_path / 'own.key'}"
        with closing(Etcd(tmp_path, flags=["--auth-token", f"jwt,{keys},sign-method=RS256,ttl=10m"])) as signing:
            guard(signing)
            with closing(Leadership(signing.location("run"))) as leader:
                gateway = leader.gateway()
                assert gateway.get("run/leader") is not None
                administer(signing, "--user=root:x user add another:y")
                held = gateway.get("run/leader")
                assert held is not None and held.created == leader.token

    def test_a_token_that_etcd_has_forgotten_is_asked_for_again(self, guarded: Etcd) -> None:
        gateway = Gateway(guarded.location("run"))
        gateway.get("run/leader")
        gateway.close()
        guarded.kill(0)
        guarded.start(0)
        assert gateway.get("run/leader") is None
