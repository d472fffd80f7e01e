# SPDX-License-Identifier: Apache-2.0
"""Planning in a process of its own: a search holds the interpreter for seconds, in which nobody would notice a death.

Run as `python -m megatron_resihp.control.replanning.planning [--low-priority]`: a request a line on standard input, an
answer a line on standard output, until the input ends. May import the standard library, `plan`, `cost`, `planner` and
this package's modules; what takes long to import only where plans are made.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from megatron_resihp.control.linux import HANDLED
from megatron_resihp.control.replanning.planner_process import LOW_PRIORITY, REHEARSAL
from megatron_resihp.plan import Chunk, ParallelPlan

NICE: Final = 19
"""Where nobody stands still for a plan, training's own processes on node 0 go first."""

ENVELOPE: Final = ("type", "event", "time", "epoch", "worker")
"""What the message, or the event, that told of a job has beside what it told."""


def request_of(
    strategy: str,
    job: Mapping[str, Any],
    workers: int,
    workers_per_node: int,
    plan: ParallelPlan,
    speeds: Mapping[int, float],
    links: Mapping[tuple[int, int], float],
    cost_model: Path | None,
) -> dict[str, Any]:
    """What is asked, as plain values.

    Args:
        strategy: by name.
        job: what workers told at the start, as a message or as an event.
        workers, workers_per_node: of the job, with all its places taken.
        plan: in force.
        speeds: of all live workers.
        links: slow ones.
        cost_model: where the detector keeps what it learns; need not be there yet.
    """
    return {
        "strategy": strategy, "job": {name: told for name, told in job.items() if name not in ENVELOPE},
        "workers": workers, "workers_per_node": workers_per_node,
        "plan": plan.to_dict(), "speeds": {str(worker): speed for worker, speed in speeds.items()},
        "links": [[*pair, speed] for pair, speed in links.items()],
        "cost_model": None if cost_model is None else str(cost_model),
    }  # fmt: skip


def answer(request: Mapping[str, Any], on_compiling: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Ask the strategy: a `planner.bridge.Proposal` as plain values, or {"no_plan": reason}.

    Args:
        on_compiling: called if machine code has to be made first.
    """
    from megatron_resihp.cost.running import UnknownCost, cost_of_job
    from megatron_resihp.pipeline.compiled import PlanningClock
    from megatron_resihp.planner import NoPlanError
    from megatron_resihp.planner.bridge import propose
    from megatron_resihp.planner.health import Health

    job = request["job"]
    own = tuple(Chunk(*chunk) for chunk in job["chunks"])
    health = Health(
        {int(worker): speed for worker, speed in request["speeds"].items()},
        {(one, other): speed for one, other, speed in request["links"]},
    )
    with PlanningClock(time.monotonic, on_compiling) as clock:
        began = clock()
        try:
            fitted = _fitted(request["cost_model"])
            cost = cost_of_job(job, request["workers"], request["workers_per_node"], own, fitted)
            proposal = propose(request["strategy"], ParallelPlan.from_dict(request["plan"]), own, health, cost)
        except (UnknownCost, NoPlanError) as error:
            return {"no_plan": str(error)}
        planning_s = clock() - began
    numbers = ("iteration_s", "current_s", "healthy_s", "moving_s", "bound_s")
    return {
        "plan": proposal.plan.to_dict(), "planning_s": planning_s,
        **{name: getattr(proposal, name) for name in numbers},
    }  # fmt: skip


@cache  # said once
def _tell_of_compiling() -> None:
    from megatron_resihp.pipeline.compiled import COMPILING

    if LOW_PRIORITY not in sys.argv:  # the other one says so, too
        print(f"resihp: {COMPILING}", file=sys.stderr, flush=True)


def _load() -> None:
    """All that strategies import, so that no request waits for it."""
    import megatron_resihp.planner.strategies.registry  # noqa: F401


def _fitted(path: str | None) -> Any:
    """What the detector has learned so far; None: nothing that can be read."""
    from megatron_resihp.cost.fitted.store import CostModelError, load

    if path is None or not Path(path).exists():
        return None
    try:
        return load(Path(path))
    except CostModelError:
        return None


def main() -> None:
    """Answer until the input ends."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    if LOW_PRIORITY in sys.argv:
        os.nice(NICE)
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else may get among the answers
    _load()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = answer(request, _tell_of_compiling)
        except Exception as error:  # a strategy's bug must not end the process, which others ask, too
            found = {"no_plan": f"{type(error).__name__}: {error}"}
        if not request.get(REHEARSAL):
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
