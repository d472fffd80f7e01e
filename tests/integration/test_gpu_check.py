# SPDX-License-Identifier: Apache-2.0
"""The check that is for GPUs, rehearsed on CPUs: so that the first minutes on a GPU are not spent on typing errors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

LIMIT_S = 1700.0
PARTS = (
    "device", "aborts", "paths", "packing", "groups", "probes", "kills", "plans", "rebuild", "detecting", "engine",
)  # fmt: skip


def rehearse(repository: Path, out: Path, *options: str) -> dict[str, object]:
    """The last line of a rehearsal, which has to pass."""
    command = [str(repository / "scripts" / "gpu_check" / "run"), "--stand-in", "--out", str(out), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return last


def test_the_shortest_cases(repository: Path, tmp_path: Path) -> None:
    """What the device is, packing, and probes. The other parts take longer, and are for the night."""
    parts = ("device", "packing", "probes")
    said = rehearse(repository, tmp_path, "--part", *parts, "--case", "device", "pack", "probes")
    assert said == {"parts": 3, "failed": 0, "failed_parts": [], "stand_in": True}


@pytest.mark.nightly
def test_all_parts_are_rehearsed(repository: Path) -> None:
    command = [str(repository / "scripts" / "gpu_check" / "run"), "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert tuple(line.split()[0] for line in listed.splitlines()) == PARTS


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_a_whole_part(repository: Path, tmp_path: Path, part: str) -> None:
    said = rehearse(repository, tmp_path / "out", "--part", part)
    assert (said["parts"], said["failed"]) == (1, 0)
