# SPDX-License-Identifier: Apache-2.0
"""`resihp apply`: which plan it takes from a file, and what it says without one. The rest is in test_launcher.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.cli import main
from megatron_resihp.plan import PlanError
from megatron_resihp.plan.files import read_plan

PLAN = {"version": 2, "replicas": [{"stages": [[0]], "micro_batches": [0]}], "standbys": {}}
OTHER = {**PLAN, "standbys": {"1": None}}


def written(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("data", "strategy"),
    [
        (PLAN, None),
        ({"plan": PLAN, "gain": 0.1}, None),
        ({"plan": OTHER, "strategies": {"joint": {"plan": PLAN}}}, None),
        ({"plan": OTHER, "strategies": {"joint": {"plan": PLAN}, "resihp": {"plan": OTHER}}}, "joint"),
    ],
    ids=["a plan", "a proposal", "an answer", "one of several answers"],
)
def test_the_plan_in_a_file(tmp_path: Path, data: Any, strategy: str | None) -> None:
    assert read_plan(written(tmp_path, data), strategy) == PLAN


@pytest.mark.parametrize(
    ("data", "strategy", "reason"),
    [
        ("{", None, "is not JSON"),
        ([], None, "holds no plan"),
        ({"event": "job"}, None, "holds no plan"),
        ({"plan": PLAN, "strategies": {"joint": {"no_plan": "too few"}}}, None, "holds no plan: too few"),
        ({"strategies": {"joint": {}, "resihp": {}}}, None, "several strategies; .*: joint"),
        ({"strategies": {"joint": {}}}, "resihp", "no plan of strategy resihp; it has joint"),
    ],
)
def test_a_file_without_a_clear_plan(tmp_path: Path, data: Any, strategy: str | None, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        read_plan(written(tmp_path, data), strategy)


def test_no_file_and_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", str(tmp_path), str(tmp_path / "no.json")]) == 2
    assert "no.json can't be read: No such file" in capsys.readouterr().err
    assert main(["apply", str(tmp_path), str(written(tmp_path, PLAN))]) == 2
    assert f"resihp: no job runs in {tmp_path}\n" == capsys.readouterr().err
