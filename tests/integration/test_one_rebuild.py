# SPDX-License-Identifier: Apache-2.0
"""Megatron's own objects built anew with little memory, in one process: no bit of what they train changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import JOB_ENVIRONMENT

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).with_name("one_rebuild.py")
GOAL = 1.05
"""The most that a rebuild may take at a time, as a share of the state before it."""
WAYS = ("host", "again", "back")


@pytest.mark.parametrize(
    ("kind", "ways"),
    # Parameters in a distributed optimizer's buffers are no state, which could be taken over.
    [("fp32", ("take over", *WAYS)), ("bf16", ("take over", *WAYS)), ("fp32+parts", WAYS), ("bf16+parts", WAYS)],
    ids=["fp32", "bf16", "parts in fp32", "parts in bf16"],
)
def test_a_rebuild_changes_no_bit_and_takes_little(kind: str, ways: tuple[str, ...]) -> None:
    command = [sys.executable, str(SCRIPT), kind, "none", *ways]
    done = subprocess.run(command, env={**os.environ, **JOB_ENVIRONMENT}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for way in ways:
        assert found[way]["steps"] == found["none"]["steps"], way
        assert found[way]["peak"] <= GOAL, found[way]
