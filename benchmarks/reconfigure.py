#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long training stands still when a running job changes its plan, by choice or because a worker has died.

    python benchmarks/reconfigure.py [--rounds N] [--kills N]

Eight CPU workers (TP 2, PP 2, DP 2) train a tiny GPT in fp32.

By choice: the job changes, every few iterations, to a plan of another kind and back: a stage of one worker less, other
layers, unlike replicas. Nothing fails.

- `voluntary_stall_s`: median over all changes of `stood_still_s` of the `reconfiguration` event, from when the first
  worker stopped until all went on; `by_change` has it for each kind.
- `phases`: medians over the changes of what each phase took the worker that took longest.
- `bytes_over_minimum`: all bytes that were sent over parameters and moments that the new plans' workers lacked. What
  is above 1 are the optimizer's counts of steps.
- `bytes_new_share`: bytes of parameters, gradients and optimizer that workers built anew over those that they had, by
  kind of change; `fail_stop_bytes_new_share` after kills. The rest was taken over from the old objects.

Fail-stop: in other jobs, run with `--resihp-strategy joint --resihp-carrier device`, a worker is killed with SIGKILL
once the planner has rehearsed and has made its plans for likely losses; the victim's tensor-parallel peers keep working
in a plan whose replicas or stages differ.

- `fail_stop_s`: median over the kills of what kills.py calls `in_place_s`: without the redone iteration's own compute.
- `fail_stop_phases`: medians; `agree` holds `planning_s`, what the strategy itself took, unless that was before.
- `made_ahead`: of how many kills the plan was there before.
- `fail_stop_asymmetric`: of how many kills the plan was one that Megatron's own groups can't run.

The last line of standard output is one JSON object.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, Final

from common import (
    POLL_S,
    SmallJob,
    all_events,
    load_average,
    print_result,
    process_tree,
    running,
    signal_all,
    wait_for,
    worker_processes,
)
from kills import PHASES, Kill, kill_in_place

from megatron_resihp.events.epochs import EpochStarted, Phase, Reconfiguration
from megatron_resihp.events.event import Event
from megatron_resihp.events.replanning import Planned
from megatron_resihp.events.workers import Resources
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, even_chunks, spelled_out
from megatron_resihp.plan.slices import TIED, WHOLE, Slice, all_shards, cuts_of, slices_of

GOALS: Final = {"voluntary_stall_s": 0.3, "fail_stop_s": 1.0}
LAUNCH: Final = ("--heartbeat-timeout", "600")
STRATEGY: Final = ("--resihp-strategy", "joint", "--resihp-plan-wait", "60", "--resihp-carrier", "device")
"""So small a model is only given a plan of unlike replicas if it isn't the host that carries what these cost."""
VICTIMS: Final = (3, 6, 1, 4)
"""The workers to kill, one after another; each has a tensor-parallel peer."""
MOMENT: Final = 0.5
"""Fraction of an iteration after which a worker is killed."""
PLANNER: Final = b"megatron_resihp.control.replanning.processes.planning"
ASLEEP_S: Final = 0.5
PLANNERS_S: Final = 240.0
"""More than the search needs to be compiled, once per installation, and to look for the plans."""
JOB: Final = SmallJob()
VOCABULARY: Final = 256
"""Vocabulary size, as Megatron pads it for two members."""
STATE_BYTES: Final = 12
"""Bytes of state per parameter: the parameter and two moments, in fp32."""
EVERY, FIRST = 4, 5
"""Iterations between changes, and the iteration of the first change."""
JOB_S: Final = 600.0
OWN: Final = even_chunks(JOB.layers, JOB.pipeline_parallel)


def plan(first: tuple[tuple[int, ...], ...], second: tuple[tuple[int, ...], ...], *layers: Any) -> ParallelPlan:
    """Two replicas by their stages, with even shares of the batch."""
    chunks = layers or (OWN, OWN)
    shares = [tuple(range(number, JOB.batch, 2)) for number in range(2)]
    return ParallelPlan((Replica(first, shares[0], chunks[0]), Replica(second, shares[1], chunks[1])))


OWN_PLAN: Final = plan(((0, 1), (4, 5)), ((2, 3), (6, 7)))
CHANGES: Final = {
    "a worker less in a stage": plan(((0, 1), (4, 5)), ((2, 3), (6,))),
    "other layers": plan(((0, 1), (4, 5)), ((2, 3), (6, 7)), *[(Chunk(0, 0, 4), Chunk(1, 4, OWN[-1].end))] * 2),
    "unlike replicas": plan(((0, 1), (4, 5)), ((2,), (3,), (6, 7)), OWN, (
        Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(2, 3, OWN[-1].end)
    )),
}  # fmt: skip


def train(rounds: int, directory: Path) -> list[Event]:
    """Run the job with each change and back, a number of times; returns its events."""
    files: list[str] = []
    for name, changed in [*CHANGES.items()] * rounds:
        for label, wanted in ((name, changed), ("back", OWN_PLAN)):
            file = directory / f"{len(files)} {label}.json"
            file.write_text(json.dumps(wanted.to_dict()))
            files.append(f"{file}@{FIRST + EVERY * len(files)}")
    command = [*JOB.under_resihp(FIRST + EVERY * len(files), directory / "run"), "--resihp-plan", *files]
    with running(command, directory / "output") as job:
        if job.wait(JOB_S) != 0:
            raise RuntimeError(f"the job failed: {(directory / 'output').read_text()[-500:]}")
    return all_events(directory / "run")


def least_bytes(before: ParallelPlan, after: ParallelPlan) -> int:
    """Bytes of parameters and moments that workers of a plan did not hold under the one before; both say their layers.

    Without the optimizer's counts of steps, of which each parameter takes its own along.
    """
    held, wanted = all_shards(before), all_shards(after)
    cuts = cuts_of(shard for table in (held, wanted) for shards in table.values() for shard in shards)
    head = JOB.layers + 1
    lacking = [
        piece
        for worker, shards in wanted.items()
        for piece in slices_of(shards, cuts, head) - slices_of(held.get(worker, ()), cuts, head)
    ]
    return STATE_BYTES * sum(_elements(piece, cuts, head) for piece in lacking)


def _elements(piece: Slice, cuts: int, head: int) -> int:
    """Parameters of a slice of Megatron's GPT with tied embeddings, learned positions, biases and LayerNorm."""
    hidden, layer = JOB.hidden, piece.layer
    if layer == TIED:
        return VOCABULARY * hidden // cuts
    if layer == 0:
        return JOB.sequence * hidden if piece.cut == WHOLE else 0
    if layer == head:
        return 2 * hidden if piece.cut == WHOLE else 0
    return 6 * hidden if piece.cut == WHOLE else (12 * hidden**2 + 7 * hidden) // cuts


def summarize(events: Sequence[Event]) -> dict[str, Any]:
    """The figures of all changes of a run."""
    changes = [event for event in events if isinstance(event, Reconfiguration)]
    plans = {
        event.epoch: spelled_out(ParallelPlan.from_dict(event.plan), OWN)
        for event in events
        if isinstance(event, EpochStarted)
    }
    by_change: dict[str, list[float]] = {}
    epochs: dict[str, set[int]] = {}
    least = moved = 0
    for change in changes:
        name = Path(change.why).stem.partition(" ")[2]
        epochs.setdefault(name, set()).add(change.to_epoch)
        by_change.setdefault(name, []).append(change.stood_still_s)
        moved += change.bytes_moved or 0
        least += least_bytes(plans[change.from_epoch], plans[change.to_epoch])
    longest: dict[tuple[str, int], float] = {}
    for event in events:
        if isinstance(event, Phase):
            key = event.phase, event.to_epoch
            longest[key] = max(longest.get(key, 0.0), event.seconds)
    phases = {phase for phase, _ in longest}
    return {
        "voluntary_stall_s": statistics.median(change.stood_still_s for change in changes),
        "longest_s": max(change.stood_still_s for change in changes),
        "by_change": {name: statistics.median(seconds) for name, seconds in by_change.items()},
        "phases": {
            phase: statistics.median(seconds for (each, _), seconds in longest.items() if each == phase)
            for phase in sorted(phases)
        },
        "bytes_moved": moved,
        "bytes_over_minimum": moved / least if least else None,
        "bytes_new_share": {name: built_anew(events, to) for name, to in epochs.items()},
        "changes": len(changes),
    }


def built_anew(events: Sequence[Event], epochs: Container[int]) -> float | None:
    """The share of their state that workers built anew on the way to these epochs; None: no worker says it."""
    told = [event for event in events if isinstance(event, Resources) and event.to_epoch in epochs]
    before = sum(event.bytes_before or 0 for event in told)
    return sum(event.bytes_new or 0 for event in told) / before if before else None


def kill(victim: int, directory: Path) -> tuple[Kill, list[Event]]:
    directory.mkdir()
    found, events = kill_in_place(JOB, victim, MOMENT, directory, STRATEGY, LAUNCH, until_planners_sleep)
    say(f"worker {victim} killed: {found.in_place_s:.3f} s")
    return found, events


def until_planners_sleep(launcher: subprocess.Popen[bytes]) -> None:
    """Wait until the job's planners sleep: they rehearse a plan when the job begins, and from its first iteration on
    make one for the loss of each worker, at the lowest priority.

    Eight workers leave them next to no time on few cores, so they are stopped meanwhile.
    """
    asleep = 0

    def look() -> bool | None:
        nonlocal asleep
        pids = [pid for pid in process_tree(launcher.pid) if PLANNER in Path(f"/proc/{pid}/cmdline").read_bytes()]
        asleep = asleep + 1 if pids and all(map(_sleeps, pids)) else 0
        return asleep * POLL_S > ASLEEP_S or None

    workers = worker_processes(launcher.pid).values()
    signal_all(workers, signal.SIGSTOP)
    try:
        wait_for("the planners", look, launcher, PLANNERS_S)
    finally:
        signal_all(workers, signal.SIGCONT)


def _sleeps(pid: int) -> bool:
    """Whether all threads of a process wait for something."""
    try:
        states = {path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")}
    except (FileNotFoundError, ProcessLookupError):
        return False  # one has ended meanwhile
    return states == {"S"}


def summarize_kills(kills: Sequence[tuple[Kill, Sequence[Event]]]) -> dict[str, Any]:
    """The figures of all kills."""
    planned = [event for _, events in kills for event in events if isinstance(event, Planned)]
    last = [[event for event in events if isinstance(event, EpochStarted)][-1] for _, events in kills]
    measured = [kill for kill, _ in kills]
    return {
        "fail_stop_s": statistics.median(kill.in_place_s for kill in measured),
        "fail_stop_each_s": [kill.in_place_s for kill in measured],
        "fail_stop_phases": {name: statistics.median(kill.phases[name] for kill in measured) for name in PHASES},
        "planning_s": [event.planning_s for event in planned],
        "fail_stop_bytes_new_share": [built_anew(events, range(1, sys.maxsize)) for _, events in kills],
        "made_ahead": sum(bool(event.made_ahead) for event in planned),
        "fail_stop_asymmetric": sum(ParallelPlan.from_dict(event.plan).not_uniform is not None for event in last),
        "kills": len(measured),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of all kinds of change, there and back (default 3)")
    parser.add_argument("--kills", type=int, default=3, help="in jobs of their own; 0: none (default 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reconfigure-") as scratch:
        result = summarize(train(options.rounds, Path(scratch)))
        say(f"by choice: {result['voluntary_stall_s']:.3f} s")
        victims = [VICTIMS[number % len(VICTIMS)] for number in range(options.kills)]
        if victims:
            result |= summarize_kills([kill(victim, Path(scratch, f"kill {n}")) for n, victim in enumerate(victims)])
    for name, goal in GOALS.items():
        if result.get(name, 0.0) > goal:
            say(f"{name}: more than {goal} s")
    print_result({**result, "load_average": load_average()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
