# SPDX-License-Identifier: Apache-2.0
"""What the check on a GPU needs beforehand: a library of NCCL's that fits, and parts that fit into their calls."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

SMALL, LARGE = b"code for one", b"code for the other"
CUBIN, PTX = 2, 1
Row = dict[str, Any]
CASES = Path(__file__).with_name("supervised_cases.py")


@pytest.fixture(autouse=True)
def on_path(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "scripts" / "gpu_check"))


def entry(kind: int, architecture: int, content: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(content)).ljust(28, b"\0") + struct.pack("<I", architecture)
    return header.ljust(64, b"\0") + content


def fat_binary(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def test_only_one_architectures_code_is_kept(tmp_path: Path) -> None:
    from prune_nccl import prune

    library, target = tmp_path / "libnccl.so.2", tmp_path / "small"
    code = fat_binary(entry(CUBIN, 90, SMALL), entry(CUBIN, 100, LARGE), entry(PTX, 90, LARGE))
    library.write_bytes(b"host code" + code + b"the rest")
    assert prune(library, target, 90) == (len(SMALL), 2 * len(LARGE))
    pruned = target.read_bytes()
    assert len(pruned) == library.stat().st_size
    assert SMALL in pruned and LARGE not in pruned
    assert pruned.startswith(b"host code") and pruned.endswith(b"the rest")
    with pytest.raises(ValueError, match="no code for sm_75"):
        prune(library, target, 75)


def test_every_case_has_a_name_of_its_own() -> None:
    """Cases are asked for by name."""
    import check

    names = [name for part in check.PARTS for name in part.cases]
    assert len(names) == len(set(names))
    assert {part.call for part in check.PARTS} == {1, 2, 3}


@pytest.mark.parametrize(("given", "taken"), [(None, "0"), ("5,6", "5"), ("GPU-7d", "GPU-7d")])
def test_all_ranks_share_the_first_device_that_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None, taken: str
) -> None:
    from setting import Setting

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert Setting(stand_in=False, out=tmp_path, ends_at=0.0).environment()["CUDA_VISIBLE_DEVICES"] == taken


def test_what_can_not_be_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import check

    assert check.main(["--stand-in", "--case", "first-hang"]) == 2
    assert capsys.readouterr().err == "gpu_check: no such case: first-hang\n"
    (tmp_path / "old").touch()
    assert check.main(["--stand-in", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"gpu_check: {tmp_path} is not empty; name a new folder\n"


Supervise = Callable[..., dict[str, Row]]


@pytest.fixture
def supervised(repository: Path, tmp_path: Path) -> Supervise:
    """The findings of cases that run beside each other on a device, where nothing uses it."""

    def supervised(*names: str, limit_s: float = 60.0, left_s: float = 60.0) -> dict[str, Row]:
        command = [sys.executable, CASES, tmp_path, str(limit_s), str(left_s), *names]
        path = {"PYTHONPATH": str(repository / "scripts" / "gpu_check")}
        done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, timeout=120, check=True)
        rows: dict[str, Row] = json.loads(done.stdout)
        return rows

    return supervised


def test_a_case_that_hangs_is_ended_with_its_processes_and_the_others_go_on(
    supervised: Supervise, tmp_path: Path
) -> None:
    """One of its processes has a session and a parent of its own."""
    rows = supervised("hangs", "well", limit_s=3.0)
    assert rows["well"]["ok"]
    assert not rows["hangs"]["ok"]
    assert rows["hangs"]["error"] == "still ran after 3 s" and rows["hangs"]["log"] == ["hanging now"]
    assert has_ended(int((tmp_path / "started").read_text()))


def test_a_case_that_crashes_has_failed_and_the_others_go_on(supervised: Supervise) -> None:
    rows = supervised("crashes", "raises", "well")
    assert [rows[name]["ok"] for name in ("crashes", "raises", "well")] == [False, False, True]
    assert rows["crashes"]["error"] == f"ended with code {-signal.SIGKILL}"
    assert rows["raises"]["error"] == "OSError: no such device"


@pytest.mark.parametrize(("left_s", "begins"), [(20.0, False), (40.0, True)])
def test_a_case_begins_if_half_of_its_limit_is_left(supervised: Supervise, left_s: float, begins: bool) -> None:
    row = supervised("late", left_s=left_s)["late"]
    assert row["ok"] == begins
    assert begins or row["error"] == "no time left"


def test_a_check_that_is_ended_leaves_nothing_running(repository: Path, tmp_path: Path) -> None:
    program = (
        "import sys, subprocess, check, dataclasses\n"
        "def run(setting, name):\n"
        f"    subprocess.run(['bash', '-c', 'echo $$ > {tmp_path}/child; exec sleep 1000'])\n"
        "check.PARTS = tuple(dataclasses.replace(part, run=run) for part in check.PARTS)\n"
        f"sys.exit(check.main(['--part', 'device', '--out', '{tmp_path}/out']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=repository / "scripts" / "gpu_check") as check:
        child = wait_for_number(tmp_path / "child")
        check.terminate()
        assert check.wait(30) == 128 + signal.SIGTERM
    assert has_ended(child)


def has_ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_number(path: Path) -> int:
    deadline = time.monotonic() + 60.0
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < deadline, f"{path.name} was not written"
        time.sleep(0.05)
    return int(path.read_text())
