# SPDX-License-Identifier: Apache-2.0
"""The last line of scripts/cluster_tests.sh, from pytest's results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).resolve().parents[3] / "scripts" / "cluster_figures.py"
CASE = '<testcase classname="tests.{0}" name="a">{1}</testcase>'


def figures(tmp_path: Path, *cases: tuple[str, str]) -> tuple[int, dict[str, Any], str]:
    results = tmp_path / "results.xml"
    results.write_text(
        f"<testsuites><testsuite>{''.join(CASE.format(*case) for case in cases)}</testsuite></testsuites>"
    )
    done = subprocess.run([sys.executable, PROGRAM, results], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


def recorded(name: str, value: object) -> str:
    return f'<properties><property name="{name}" value="{value}"/></properties>'


def test_failures_and_figures_are_counted_where_they_belong(tmp_path: Path) -> None:
    code, found, said = figures(
        tmp_path,
        ("integration.test_control_chaos", recorded("chaos_longest_silence_s", 7.5)),
        ("integration.test_control_chaos", recorded("chaos_longest_silence_s", 12.0)),
        ("integration.test_control_chaos", "<failure/>"),
        ("integration.test_attacks", ""),
        ("unit.control.transport.test_strangers.TestGate", ""),
        ("unit.control.model.test_agreement", recorded("checker_states", 1_000_001)),
        ("integration.test_takeover", recorded("node0_next_step_s", 2.5)),
        ("unit.benchmarks.test_scale_benchmark", recorded("new_plan_10000_s", 0.625)),
        ("cluster.test_slurm", "<error/>"),
        ("cluster.test_slurm", "<skipped/>"),
    )
    assert code == 0
    assert found == {
        "cases": 9, "failed": 2, "chaos_sequences": 3, "chaos_violations": 1, "attacks": 2, "attacks_succeeded": 0,
        "node0_next_step_s": 2.5, "chaos_longest_silence_s": 12.0, "checker_states": 1_000_001,
        "new_plan_10000_s": 0.625,
    }  # fmt: skip
    assert said == "1 left out: a program is missing, or this is not root\n"


def test_what_was_not_measured_is_none(tmp_path: Path) -> None:
    code, found, _ = figures(tmp_path, ("cluster.test_slurm", "<skipped/>"))
    assert code == 1 and found["cases"] == 0 and found["node0_next_step_s"] is None
