# SPDX-License-Identifier: Apache-2.0
"""Kills a worker of a running job from outside, and reads the recovery from the event log.

Clock: Unix time.
- The end is the time of the last `first_step` event, which a worker writes when it has completed the first iteration
  after the recovery. `in_place_with_redo_s` is the time from just before os.kill to there.
- If the iteration that broke had to be computed again (`steps_redone` of the `recovery` event is 1), the time of a
  normal iteration in the new layout is subtracted: the median `duration_s` of the `iteration` events of the new epoch,
  the first one of that epoch left out. That gives `in_place_s`. If the step had been agreed on before the kill and was
  only completed, nothing is subtracted, although `first_step` then ends a whole new iteration.
- `phases` add up to `in_place_s` of their kill: a phase lasts from when the last worker ended the phase before until
  the last worker ended this one. `notice` ends when the epoch is marked as broken, and what the workers take longer to
  hear of it is part of `abort`; `ready` ends when the coordinator lets all go on; `rest` is from the end of `data` to
  `first_step`, less the same normal iteration. `longest` has for each phase the worker that took longest, with all its
  waiting for others.

May import the standard library, `common` and `megatron_resihp.report`.
"""

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import END_S, EventTail, SmallJob, all_events, load_average, running, wait_for, worker_processes

from megatron_resihp.events.epochs import FirstStep, Phase, Recovery
from megatron_resihp.events.event import Event
from megatron_resihp.events.training import Iteration

PHASES = ("notice", "abort", "agree", "rebuild", "migrate", "ready", "data", "rest")
WARM_UP = 12
"""Iterations before a kill."""
AFTER = 10
"""Iterations after the kill, which give the time of a normal iteration."""
LONG = 2_000
"""The job's train-iters; the job is ended earlier."""
START_S = 180.0


@dataclass(frozen=True)
class Kill:
    """One measured recovery; times in seconds, as the module says."""

    victim: int
    in_place_s: float
    in_place_with_redo_s: float
    redone: bool
    iteration_s: float
    phases: dict[str, float]
    longest: dict[str, float]
    load_average: float


def kill_in_place(
    job: SmallJob,
    victim: int,
    fraction: float,
    directory: Path,
    flags: Sequence[str] = (),
    options: Sequence[str] = (),
    before: Callable[[subprocess.Popen[bytes]], None] = lambda launcher: None,
) -> tuple[Kill, list[Event]]:
    """Run one job, kill one worker `fraction` of an iteration after one has ended, and end it after a few more.

    Args:
        flags: of the job, beside its own.
        options: of `resihp launch`.
        before: called with the launcher when the job is warm; the kill comes after it.

    Returns:
        what was measured, and all events of the run.

    Raises:
        RuntimeError: the job did not recover, or did not go on.
    """
    run_dir = directory / "run"
    tail = EventTail(run_dir)
    command = [*job.under_resihp(LONG, run_dir, options=options), *flags]
    with running(command, directory / "output") as launcher:
        wait_for("warm-up", lambda: _iterations(tail.look(), 0, WARM_UP), launcher, START_S)
        before(launcher)
        load, seen = load_average(), len(_iterations(tail.look(), 0, 0) or ())
        healthy = wait_for("an iteration", lambda: _iterations(tail.look(), 0, seen + 1), launcher, START_S)
        pid = worker_processes(launcher.pid)[victim]
        time.sleep(fraction * _median_s(healthy[2:]))
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        wait_for("recovery", lambda: _iterations(tail.look(), 1, AFTER), launcher, START_S)
        launcher.send_signal(signal.SIGTERM)
        if launcher.wait(END_S) != 128 + signal.SIGTERM:
            raise RuntimeError(f"the job ended with exit code {launcher.returncode} after worker {victim} was killed")
    events = all_events(run_dir)
    return measure(events, victim, killed_at, load), events


def _iterations(events: Sequence[Event], epoch: int, number: int) -> list[Iteration] | None:
    """The iterations of an epoch, once there are `count`."""
    found = [event for event in events if isinstance(event, Iteration) and event.epoch == epoch]
    return found if len(found) >= number else None


def _median_s(iterations: Sequence[Iteration]) -> float:
    return statistics.median(event.duration_s for event in iterations if event.duration_s is not None)


def measure(events: Sequence[Event], victim: int, killed_at: float, load: float) -> Kill:
    """The recovery from the kill at `killed_at`, from the event log."""
    (recovery,) = (event for event in events if isinstance(event, Recovery))
    if recovery.broken_at is None or recovery.resumed_at is None:
        raise RuntimeError("the event log does not say when the job recovered")
    iteration_s = _median_s((_iterations(events, recovery.to_epoch, 0) or [])[1:])
    total_s = max(event.time for event in events if isinstance(event, FirstStep)) - killed_at
    redo_s = iteration_s if recovery.steps_redone else 0.0
    workers = _phases_by_worker(events)
    ends = {"notice": recovery.broken_at - killed_at}
    for name in PHASES[1:-1]:
        ends[name] = recovery.resumed_at - killed_at + max(_after_go(name, phases) for phases in workers)
    ends["rest"] = total_s - redo_s
    starts = [0.0, *ends.values()]
    return Kill(
        victim=victim,
        in_place_s=total_s - redo_s,
        in_place_with_redo_s=total_s,
        redone=bool(recovery.steps_redone),
        iteration_s=iteration_s,
        phases={name: end - start for (name, end), start in zip(ends.items(), starts, strict=False)},
        longest={name: max(phases[name] for phases in workers) for name in PHASES[1:-1]},
        load_average=load,
    )


def _phases_by_worker(events: Sequence[Event]) -> list[dict[str, float]]:
    found: dict[int | None, dict[str, float]] = {}
    for event in events:
        if isinstance(event, Phase):
            found.setdefault(event.worker, {})[event.phase] = event.seconds
    return list(found.values())


def _after_go(name: str, phases: dict[str, float]) -> float:
    """When a worker ended a phase, relative to *go*, which ends `ready` on every worker."""
    if name == "data":
        return phases["data"]
    return -sum(phases[phase] for phase in PHASES[PHASES.index(name) + 1 : PHASES.index("data")])
