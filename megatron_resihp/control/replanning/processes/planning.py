# SPDX-License-Identifier: Apache-2.0
"""Planning in a process of its own: a search holds the interpreter for seconds, in which a death would go unnoticed.

Run as `python -m megatron_resihp.control.replanning.processes.planning [--low-priority]`: a request a line on standard
input, an answer a line on standard output, until the input ends. May import the standard library, `plan`, `protocol`,
`cost`, `planner` and `control.replanning`; what takes long to import only where plans are made.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from megatron_resihp.control.linux import HANDLED
from megatron_resihp.control.replanning.processes.planner_process import LOW_PRIORITY
from megatron_resihp.control.streams import unfailing
from megatron_resihp.protocol.planning import (
    PLANNER_ANSWERS,
    PLANNER_REQUESTS,
    NoPlan,
    PlannerAnswer,
    PlannerRequest,
)
from megatron_resihp.protocol.wire import MalformedError

if TYPE_CHECKING:
    from megatron_resihp.cost.fitted.model import CostModel

NICE: Final = 19
"""Where training does not stand still for a plan, training's own processes on node 0 go first."""

SENDER: Final = "the planner"


def answer(request: PlannerRequest, on_compiling: Callable[[], None] = lambda: None) -> PlannerAnswer:
    """Ask the strategy.

    Args:
        on_compiling: called if machine code has to be made first.
    """
    from megatron_resihp.cost.running import UnknownCost, cost_of_job
    from megatron_resihp.pipeline.compiled import PlanningClock
    from megatron_resihp.planner import NoPlanError
    from megatron_resihp.planner.bridge import propose
    from megatron_resihp.planner.health import Health

    health = Health(request.speeds, {(one, other): speed for one, other, speed in request.links})
    with PlanningClock(time.monotonic, on_compiling) as clock:
        began = clock()
        try:
            fitted = _fitted(request.cost_model)
            cost = cost_of_job(request.job, request.workers, request.workers_per_node, request.own, fitted)
            return propose(request.strategy, request.plan, request.own, health, cost, lambda: clock() - began)
        except (UnknownCost, NoPlanError) as error:
            return NoPlan(str(error))


@cache  # said once
def _tell_of_compiling() -> None:
    from megatron_resihp.pipeline.compiled import COMPILING

    if LOW_PRIORITY not in sys.argv:  # the other one says so, too
        print(f"resihp: {COMPILING}", file=sys.stderr, flush=True)


def _load() -> None:
    """All that strategies import, so that no request waits for it."""
    import megatron_resihp.planner.strategies.registry  # noqa: F401


def _fitted(path: str | None) -> CostModel | None:
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
    sys.stderr = unfailing(sys.stderr)  # the launcher's, and no answer
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else may get among the answers
    _load()
    for line in sys.stdin:
        found = _answer_to(line)
        if found is not None:
            print(PLANNER_ANSWERS.write(found, SENDER), file=answers, flush=True)


def _answer_to(line: str) -> PlannerAnswer | None:
    """The answer to a request; None: no thread waits for it."""
    try:
        request = PLANNER_REQUESTS.read(line).body
    except MalformedError as error:
        return NoPlan(str(error))
    try:
        found = answer(request, _tell_of_compiling)
    except Exception as error:  # a strategy's bug must not end the process, which others ask, too
        found = NoPlan(f"{type(error).__name__}: {error}")
    return None if request.rehearsal else found


if __name__ == "__main__":
    main()
