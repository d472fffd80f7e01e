# SPDX-License-Identifier: Apache-2.0
"""What the check on a GPU needs beforehand: a library of NCCL's that fits, and parts that fit into their calls."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

SMALL, LARGE = b"code for one", b"code for the other"
CUBIN, PTX = 2, 1


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


def test_a_case_that_there_is_not(repository: Path) -> None:
    command = [str(repository / "scripts" / "gpu_check" / "run"), "--stand-in", "--case", "first-hang"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "no such case: first-hang" in ended.stderr


def test_a_case_for_which_no_time_is_left_has_failed(tmp_path: Path) -> None:
    from setting import Setting

    setting = Setting(True, tmp_path, ends_at=0.0)
    (row,) = setting.each(["late"], lambda name: {"ok": True})
    assert not row["ok"] and row["error"] == "no time left"


def test_a_case_that_raises_has_failed(tmp_path: Path) -> None:
    from setting import Setting

    def run(name: str) -> dict[str, object]:
        raise OSError("no such device")

    (row,) = Setting(True, tmp_path, ends_at=sys.float_info.max).each(["broken"], run)
    assert not row["ok"] and row["error"] == "OSError: no such device"
