# SPDX-License-Identifier: Apache-2.0
"""How etcd lets a job in, as etcdctl's variables say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_resihp.control.transport.etcd.access import OPEN, Access, access_of


@pytest.mark.parametrize(
    ("said", "access"),
    [
        ({}, OPEN),
        ({"CACERT": "", "USER": ""}, OPEN),
        ({"CACERT": "ca"}, Access("ca")),
        ({"CACERT": "ca", "CERT": "own", "KEY": "key"}, Access("ca", "own", "key")),
        ({"USER": "job:a:b"}, Access(user="job", password="a:b")),
        ({"USER": "job", "PASSWORD": "a"}, Access(user="job", password="a")),
        ({"PASSWORD": "of nobody"}, OPEN),
    ],
)
def test_is_as_the_variables_say(said: dict[str, str], access: Access) -> None:
    assert access_of({f"ETCDCTL_{name}": value for name, value in said.items()}) == access


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"CACERT": "ca", "CERT": "own"}, "ETCDCTL_CERT and ETCDCTL_KEY belong together"),
        ({"CACERT": "ca", "KEY": "key"}, "ETCDCTL_CERT and ETCDCTL_KEY belong together"),
        ({"CERT": "own", "KEY": "key"}, "ETCDCTL_CERT needs ETCDCTL_CACERT"),
        ({"USER": "job"}, "ETCDCTL_USER has no password"),
    ],
)
def test_what_does_not_fit_together_is_said(said: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        access_of({f"ETCDCTL_{name}": value for name, value in said.items()})


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ETCDCTL_CACERT={tmp_path / 'none'} can't be used (No such file")):
        Access(str(tmp_path / "none")).context()
    (tmp_path / "ca").write_text("nothing")
    with pytest.raises(ValueError, match=re.escape(f"ETCDCTL_CACERT={tmp_path / 'ca'} can't be used (")):
        Access(str(tmp_path / "ca")).context()


def test_no_password_is_shown() -> None:
    assert "hush" not in repr(Access(user="job", password="hush"))
