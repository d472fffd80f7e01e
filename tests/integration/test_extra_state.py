# SPDX-License-Identifier: Apache-2.0
"""Layers that keep more than parameters and buffers: what they keep moves, is saved and compared like all other state.

Transformer Engine's do on GPUs; engine_gpt.py has layers that do so on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Jobs, ask_at, ask_for, tiny
from stock_runs import Steps, check_like_stock, losses_of, stock_steps
from test_checkpoints import SAVED
from test_plans import FOUR, MODEL, UNIFORM_LAYOUT, chunks, own_plan, stages

from megatron_resihp.control.coordination.digests import EXTRA
from megatron_resihp.plan import ParallelPlan, Replica

ENGINE = Path(__file__).with_name("engine_gpt.py")
TWO_REPLICAS: dict[str, Any] = {"tensor_model_parallel_size": 2, "train_iters": 8}
EIGHT_BITS: dict[str, Any] = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
Stock = Callable[..., Steps]
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def stock(jobs: Jobs) -> Stock:
    """What stock Megatron trains with such layers; run once for each model."""
    known: dict[str, Steps] = {}

    def steps(workers: int, **flags: Any) -> Steps:
        key = f"{workers} {sorted(flags.items())}"
        if key not in known:
            known[key] = stock_steps(jobs, workers, ENGINE, **flags)
        return known[key]

    return steps


def check(job: Job, expected: Steps, layers: int) -> None:
    """It has trained what stock Megatron has, and at its end all holders of a layer say the same of what it keeps."""
    check_like_stock(job, expected)
    last = max(event["iteration"] for event in job.events("digest"))
    found: dict[int, set[str]] = {}
    for event in job.events("digest"):
        for key, digest in event["digests"].items():
            layer, cut, *_ = map(int, key.split("/"))
            if event["iteration"] == last and cut == EXTRA:
                found.setdefault(layer, set()).add(digest)
    assert sorted(found) == list(range(1, layers + 1))
    assert all(len(digests) == 1 for digests in found.values()), found


@pytest.mark.parametrize("optimizer", [{}, {"use_distributed_optimizer": True}], ids=["plain", "shared out"])
def test_workers_die_until_a_standby_takes_over(
    jobs: Jobs, tmp_path: Path, stock: Stock, optimizer: dict[str, Any]
) -> None:
    """In the middle of an iteration, and at its end; then the layers are shared out anew."""
    halves = ParallelPlan((Replica(stages([1], [2]), tuple(range(4)), chunks(2, 4)),), {})
    injected = ["kill:3@2:backward", "kill:0@3:norm"]
    flags = TWO_REPLICAS | optimizer | {"resihp_plan": ask_at(tmp_path, (halves, 4)), "resihp_inject": injected}
    job = jobs.run(tiny(**flags), workers=4, script=ENGINE)
    assert len(job.events("epoch_started")) == 4, job.tails()
    check(job, stock(4, **TWO_REPLICAS), layers=2)


def test_a_worker_comes_back(jobs: Jobs, stock: Stock) -> None:
    """It gets what the others keep."""
    arguments = tiny(**TWO_REPLICAS, resihp_inject="kill:3@3:step")
    # The others are in iteration 5 at most, however long the joining worker takes to start.
    job = jobs.start(arguments, workers=4, max_restarts=1, script=ENGINE, wishes=["hold-0-5"])
    job.await_event("worker_waiting", waiting=7, place=3)
    job.wish("go_on")
    job.wait()
    assert job.summary.came_back == (7,), job.tails()
    check(job, stock(4, **TWO_REPLICAS), layers=2)


def test_eight_bits_in_any_order(jobs: Jobs, tmp_path: Path, stock: Stock) -> None:
    """Plans whose first micro-batch forwards is the last one backwards, with casts of weights that must not be old."""
    names = ("V shape", "a standby keeps its shard")
    flags = MODEL | UNIFORM_LAYOUT | EIGHT_BITS | {"train_iters": 8}
    plans = ask_for(tmp_path, *(FOUR[name] for name in names), own_plan(4))
    job = jobs.run(tiny(**flags, resihp_plan=plans), workers=4, script=ENGINE)
    assert len(job.events("epoch_started")) == 2 + len(names), job.tails()
    check(job, stock(4, **flags), layers=4)


@pytest.mark.parametrize("plan", ["own", "unlike replicas"])
def test_a_checkpoint_has_it(jobs: Jobs, tmp_path: Path, stock: Stock, plan: str) -> None:
    flags = MODEL | UNIFORM_LAYOUT | {"ckpt_format": "torch_dist", "train_iters": 8}
    saving = {"save": tmp_path / "saved", "save_interval": SAVED, "exit_interval": SAVED}
    change = {} if plan == "own" else {"resihp_plan": ask_at(tmp_path, (FOUR[plan], 2))}
    saved = jobs.run(tiny(**flags | saving | change), workers=4, script=ENGINE)
    assert saved.code == 0, saved.tails()
    job = jobs.run(tiny(**flags, load=tmp_path / "saved"), workers=4, script=ENGINE)
    assert job.code == 0, job.tails()
    expected = losses_of(stock(4, **flags))
    assert job.summary.loss == pytest.approx({n: loss for n, loss in expected.items() if n > SAVED}, rel=1e-5)
