# SPDX-License-Identifier: Apache-2.0
"""Who has a run's secret, and where it never is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from megatron_resihp.control.transport.access.secret import (
    FILE_NAME,
    VARIABLE,
    UnreadableError,
    find_secret,
    fresh_secret,
    published_secret,
)


@pytest.fixture(autouse=True)
def no_secret_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_only_its_user_can_read_the_file_while_the_job_runs(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text("an earlier run's, which anybody reads")
    path.chmod(0o644)
    before = os.umask(0)
    try:
        with published_secret(tmp_path) as secret:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert find_secret(tmp_path) == secret and len(secret.text) == 64
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_each_run_has_another(tmp_path: Path) -> None:
    with published_secret(tmp_path) as first:
        pass
    with published_secret(tmp_path) as second:
        assert first != second


def test_a_later_jobs_secret_stays(tmp_path: Path) -> None:
    with published_secret(tmp_path):
        (tmp_path / FILE_NAME).write_text("of a job that has the directory by now")
    assert find_secret(tmp_path).text == "of a job that has the directory by now"


def test_the_users_own_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FILE_NAME).write_text("an earlier run's")
    monkeypatch.setenv(VARIABLE, "a secret that a user gives")
    with published_secret(tmp_path) as secret:
        assert list(tmp_path.iterdir()) == [] and find_secret(tmp_path) == secret


def test_what_can_t_be_had_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnreadableError, match=r"secret can't be read \(No such file.*\); .* RESIHP_SECRET$"):
        find_secret(tmp_path)
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(UnreadableError, match="RESIHP_SECRET has 5 characters; give 16 or more"):
        find_secret(tmp_path)


def test_it_does_not_show_where_it_is_printed() -> None:
    secret = fresh_secret()
    assert secret.text not in f"{secret} {secret!r} {[secret]}"
