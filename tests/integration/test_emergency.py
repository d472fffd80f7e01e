# SPDX-License-Identifier: Apache-2.0
"""Node 0 is lost, survivors save, `resihp emergency` makes a checkpoint, and the same command line goes on from it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import BF16, EXPERTS, FP32, WISHING, Job, Jobs, Tolerance, ask_at, environment_of, tiny
from test_nodes import FUSED, TWO_NODES, free_port
from test_plans import FOUR, LLAMA, MODEL, UNIFORM_LAYOUT

from megatron_resihp.control import exit_codes
from megatron_resihp.control.worker.saved_state import flags, newest_state

NIGHTLY = pytest.mark.nightly
UNLIKE: dict[str, Any] = MODEL | UNIFORM_LAYOUT | {"train_iters": 12}
"""Of two workers on each node. Under the plan "unlike replicas" those of node 1 hold all state."""
SHARED: dict[str, Any] = {"use_distributed_optimizer": True}
MUON: dict[str, Any] = SHARED | {"bf16": True, "optimizer": "muon", "muon_fp32_matmul_prec": "high"}
EMERGING = pytest.mark.skipif(
    importlib.util.find_spec("emerging_optimizers") is None,
    reason="emerging-optimizers is not installed: Megatron takes Muon from it",
)
COMMAND_S = 240.0
"""Far longer than it takes where it has a core of its own: some ten seconds."""


def emergency(run_dir: Path) -> subprocess.CompletedProcess[str]:
    """Run the command where there is no GPU and nothing stands in for one."""
    environment = {name: value for name, value in environment_of(FUSED).items() if name != "RESIHP_CPU"}
    return subprocess.run(
        [sys.executable, "-m", "megatron_resihp.cli", "emergency", str(run_dir)],
        env=environment, capture_output=True, text=True, timeout=COMMAND_S,
    )  # fmt: skip


def lose_node_0(jobs: Jobs, arguments: list[str], script: Path) -> Job:
    """Kill node 0 after iteration 5; returns the other node."""
    options = {"workers": 2, "nodes": 2, "coordinator": ["127.0.0.1", free_port()], "script": script}
    first, second = (jobs.start(arguments, node=node, wishes=["hold-0-7"], **options) for node in range(2))
    first.await_event("iteration", iteration=5)
    first.kill()
    assert second.wait().code == exit_codes.RETRY, second.output()
    return second


@NIGHTLY
@pytest.mark.parametrize(
    ("model", "plan", "script", "tolerance"),
    [
        (UNLIKE, "unlike replicas", WISHING, FP32),
        (UNLIKE | LLAMA | {"bf16": True}, "unlike replicas", WISHING, BF16),
        (UNLIKE | EXPERTS | {"sequence_parallel": True}, "unlike replicas", WISHING, FP32),
        (UNLIKE | SHARED, "unlike replicas", FUSED, FP32),
        (TWO_NODES | SHARED, None, FUSED, FP32),
        (TWO_NODES | LLAMA | SHARED | {"bf16": True}, None, FUSED, BF16),
        pytest.param(TWO_NODES | MUON, None, FUSED, BF16, marks=EMERGING),
    ],
    ids=[
        "unlike", "unlike, 16 bits", "unlike, experts", "unlike, distributed", "distributed", "distributed, 16 bits",
        "distributed Muon",
    ],
)  # fmt: skip
def test_what_survivors_saved_in_parts_is_gone_on_from(
    jobs: Jobs, tmp_path: Path, model: dict[str, Any], plan: str | None, script: Path, tolerance: Tolerance
) -> None:
    reference = jobs.reference(tiny(**model), workers=4)
    changing = {} if plan is None else {"resihp_plan": ask_at(tmp_path, (FOUR[plan], 2))}
    lost = lose_node_0(jobs, tiny(**model, **changing), script)
    told = [line for line in lost.output().splitlines() if f"resihp emergency {lost.run_dir}" in line]
    assert len(told) == 1 and newest_state(lost.run_dir) is None, lost.output()
    made = emergency(lost.run_dir)
    assert made.returncode == 0, made.stdout + made.stderr
    found = newest_state(lost.run_dir)
    assert found is not None and found[1] >= 5
    assert " ".join(flags(found[0])) in made.stdout
    assert flags(found[0])[0] == "--load" and len(flags(found[0])) == 2
    again = jobs.run([*tiny(**model), *flags(found[0])], workers=4, script=script)
    assert again.code == 0, again.tails()
    rest = {number: loss for number, loss in reference.summary.loss.items() if number > found[1]}
    assert rest and again.summary.loss == pytest.approx(rest, rel=tolerance.loss)
