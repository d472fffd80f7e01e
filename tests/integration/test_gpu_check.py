"""The check that is for GPUs, rehearsed on CPUs: so that the first minutes on a GPU are not spent on typing errors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

LIMIT_S = 1700.0


def rehearse(repository: Path, out: Path, *options: str) -> dict[str, object]:
    """The last line of a rehearsal, which has to pass."""
    command = [str(repository / "scripts" / "gpu_check" / "run"), "--stand-in", "--out", str(out), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return last


def test_the_shortest_cases(repository: Path, tmp_path: Path) -> None:
    """A peer that dies, copies, a transfer, and a job that loses its communicators twice."""
    cases = ("device", "first-hangs", "transfer", "pack", "alone")
    said = rehearse(repository, tmp_path, "--part", "device", "aborts", "paths", "packing", "kills", "--case", *cases)
    assert said == {"parts": 5, "failed": 0, "failed_parts": [], "stand_in": True}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("call", (1, 2, 3))
def test_the_whole_check(repository: Path, tmp_path: Path, call: int) -> None:
    said = rehearse(repository, tmp_path, "--call", str(call), "--seconds", "1200")
    assert said["failed"] == 0
