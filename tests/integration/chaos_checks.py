# SPDX-License-Identifier: Apache-2.0
"""What test_chaos.py demands of a job, whatever has happened to it: the contract of DESIGN section 4."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Tolerance, check_training, difference_table

from megatron_resihp.control import exit_codes
from megatron_resihp.control.coordination.decisions.replay import Replay
from megatron_resihp.control.head.decision_file import read_decisions
from megatron_resihp.control.replanning.recovery.inventory import copied_experts, lacking
from megatron_resihp.plan import Chunk, ParallelPlan, spelled_out
from megatron_resihp.plan.copies import lost_parts
from megatron_resihp.report.run.summary import compare

LONGEST_SILENCE_S = 30.0
PROGRESS = frozenset((
    "job", "epoch_started", "iteration", "agreed", "worker_dead", "worker_restarted", "worker_waiting", "epoch_broken",
    "plan_change", "change_refused", "salvage", "run_finished", "drill",
))  # fmt: skip
EVALUATED = re.compile(r"validation loss at (iteration [^|]+) \| lm loss value: (\S+)")


def check_contract(job: Job, reference: Job, tolerance: Tolerance) -> None:
    """Training is the reference's, or has ended because it had to, saying why; and nothing has hung.

    That no process is left running and no part has given up, `Job.wait` has checked.

    Args:
        tolerance: how far sums in another order may lead from the reference.
    """
    check_silence(job)
    assert not job.events("worker_failed"), job.tails()
    check_evaluations(job, reference, tolerance)
    check_decisions(job)
    if job.code == 0:
        check_training(job, reference, tolerance)
        assert evaluations(job).keys() == evaluations(reference).keys()
    else:
        check_end(job, reference, tolerance)


def evaluations(job: Job) -> dict[str, list[float]]:
    """Losses of evaluations, as everybody reads them: from Megatron's log, of whoever has written it. By iteration and
    data set."""
    found: dict[str, list[float]] = {}
    for path in sorted((job.run_dir / "logs").glob("worker_*.log")):
        for when, loss in EVALUATED.findall(path.read_text(errors="replace")):
            found.setdefault(when, []).append(float(loss))
    return found


def check_evaluations(job: Job, reference: Job, tolerance: Tolerance) -> None:
    """Those that were begun anew too."""
    expected = evaluations(reference)
    for when, losses in evaluations(job).items():
        [loss] = expected[when]
        assert losses == pytest.approx([loss] * len(losses), rel=tolerance.loss), when


def check_decisions(job: Job) -> None:
    """What the coordinator decided follows from what it heard, all of it."""
    found = read_decisions(job.run_dir)
    assert not found.problem
    assert len(list(Replay(found.start).fold(found.steps))) == len(found.steps)


def check_silence(job: Job) -> None:
    """Something happens at least every 30 s."""
    times = [event["time"] for event in job.events() if event["event"] in PROGRESS]
    first, last = max(pairwise(sorted(times)), key=lambda pair: pair[1] - pair[0])
    assert last - first <= LONGEST_SILENCE_S, f"nothing for {last - first:.1f} s\n{job.tails()}"


def check_end(job: Job, reference: Job, tolerance: Tolerance) -> None:
    """It could not go on (contract 6): it says so, all that survivors hold is written, and till then all was well."""
    [end] = job.events("run_finished")
    assert job.code == end["exit_code"] == exit_codes.NO_PLAN, job.tails()
    assert end["reason"].startswith("no plan fits the survivors"), job.tails()
    assert end["reason"] in job.output()
    assert must_end(job), f"the survivors could have gone on\n{job.tails()}"
    check_what_was_trained(job, reference, tolerance)
    survivors = survivors_of(job)
    saves = job.events("salvage")
    assert saves or not any(survivors.values()), job.tails()
    assert all(Path(event["path"]).exists() for event in saves)
    last = max(job.summary.loss, default=0)
    assert {event["iteration"] for event in saves} <= {last}, job.tails()


def check_what_was_trained(job: Job, reference: Job, tolerance: Tolerance) -> None:
    """Every iteration so far is the reference's, and has had its samples."""
    summary, expected = job.summary, reference.summary
    assert sorted(summary.loss) == list(range(1, len(summary.loss) + 1)), job.tails()
    difference = compare(summary.loss, expected.loss)
    assert difference is None or difference <= tolerance.loss, difference_table(summary, expected)
    assert not summary.log_damaged
    assert not summary.samples_lost and not summary.samples_applied_twice and not summary.samples_out_of_place
    assert not summary.ignored_events, summary.ignored_events


def survivors_of(job: Job) -> dict[int, Any]:
    """What those hold who were alive when the job ended, by the last plan that was run."""
    dead = {event["dead"] for event in job.events("worker_dead")}
    _, full = last_plan(job)
    return {worker: full.shards_of(worker) for worker in full.members if worker not in dead}


def last_plan(job: Job) -> tuple[ParallelPlan, ParallelPlan]:
    """The plan that was run last, as it is and spelled out."""
    [told] = job.events("job")
    own = tuple(Chunk(*chunk) for chunk in told["chunks"])
    plan = ParallelPlan.from_dict(job.events("epoch_started")[-1]["plan"])
    return plan, spelled_out(plan, own)


def must_end(job: Job) -> bool:
    """Whether the survivors of the last plan lack state; however few they are, there is memory enough for all of it.

    Where workers share experts or sequences, all plans are uniform ones. So there may also be too few survivors for a
    replica. Where they share experts, the parts of a distributed optimizer have the experts, too. Without one, experts
    that are held once have copies.
    """
    [told] = job.events("job")
    plan, full = last_plan(job)
    held = survivors_of(job)
    sharers = told["expert_parallel"] or 1
    uniform = max(sharers, told["context_parallel"] or 1) > 1 or plan.expert_members
    too_few = uniform and len(held) < told["tensor_parallel"] * told["pipeline_parallel"]
    shared_out = told["distributed_optimizer"] and plan.not_uniform is None
    lost = shared_out and bool(lost_parts(plan, held, one_node))
    in_parts = shared_out and sharers > 1
    by_keeper = {} if shared_out else copied_experts(plan, full.replicas[0].chunks, held, one_node)
    copied = [shard for shards in by_keeper.values() for shard in shards]
    return too_few or lost or (not in_parts and bool(lacking(held, full.replicas[0].chunks[-1].end, copied=copied)))


def one_node(worker: int) -> int:
    """All workers are on it."""
    return 0
