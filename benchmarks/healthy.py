#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The cost of --resihp in an undisturbed job.

    python benchmarks/healthy.py [--case NAME] [--rounds N]

Three jobs train the same small GPT with two CPU workers each: one under `resihp launch` with --resihp, and two without
the plugin under torchrun. In each micro-batch the hosts wait for DEVICE_S seconds, as for devices that compute
meanwhile. Computing on few cores instead can't be compared: turns of seconds spread by 8 %, the same job started five
times differs by 10 % in its median, and the plugin's own threads have no core left that a node with devices has.

The jobs are there at the same time, but only one of them runs: it does a turn of a few iterations while all processes
of the others are stopped, between two iterations. Each job has one turn in a round, in all orders one after another, so
that all three have the same neighbours, temperature and caches. What a job does in the background, such as judging its
records, is part of its own turns.

- A turn lasts from when it was told to all workers until the last of them has ended its last iteration, by the system's
  monotonic clock; both kinds of job report in the same way (`paced_training.py`).
- `overhead_percent`: median over the rounds of the turn with --resihp over the mean of both turns without it.
- `noise_percent`: the same between the two jobs that are alike. What lies within its bounds can't be told from nothing.
- `bounds`: of each median, 95 %, by order statistics (sign test), so that no distribution is assumed.
- `cpu_percent`: CPU time of all processes of the job, launcher included, in all turns together, over those without the
  plugin. There can be more of it without a longer iteration where some core would have been idle.

Cases are what users leave on: `CASES` has their flags. All jobs of a case have them. Where a case saves, each turn has
a save, since a median over turns would not see one that few of them have.

The detector warms up for 52 iterations and judges from then on; the rounds go well beyond that. The last line of
standard output is one JSON object.
"""

import argparse
import itertools
import math
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from common import SmallJob, load_average, print_result, process_tree, running, signal_all, wait_for

GOAL_PERCENT: Final = 0.5
DEVICE_S: Final = 0.5
"""Of a micro-batch: an iteration of four takes 2.3 s, about a tenth of it the hosts' own work."""
TENSOR: Final = SmallJob(tensor_parallel=2, pipeline_parallel=1, replicas=1, layers=4, hidden=64, sequence=128, batch=4)
REPLICAS: Final = replace(TENSOR, tensor_parallel=1, replicas=2, batch=8)
DIRECTORY: Final = "{directory}"
"""Stands for a job's own directory."""
SCRIPT: Final = Path(__file__).resolve().parent / "paced_training.py"
WARM_UP: Final = 6
"""Iterations before the first round; the first one reports by itself."""
TURN: Final = 2
"""Iterations."""
CONFIDENCE: Final = 0.95
START_S: Final = 180.0
TURN_S: Final = 120.0
LAST_LINES: Final = 40
SHARED_OUT: Final = ("--use-distributed-optimizer",)
BESIDE_TRAINING: Final = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
"""Without the persistent worker, Megatron saves in between."""
CASES: Final[Mapping[str, SmallJob]] = {
    "default": TENSOR,
    "distributed-optimizer": replace(REPLICAS, more=SHARED_OUT),
    "overlap": replace(REPLICAS, more=(*SHARED_OUT, "--overlap-grad-reduce", "--overlap-param-gather")),
    "async-save": replace(
        TENSOR, more=("--save", f"{DIRECTORY}/saved", "--save-interval", str(TURN), *BESIDE_TRAINING)
    ),
    "tensorboard": replace(TENSOR, more=("--tensorboard-dir", f"{DIRECTORY}/curves", "--log-timers-to-tensorboard")),
}
LAUNCH: Final = ("--heartbeat-timeout", "600")
"""The heartbeat time-out: a job that waits for its turn is stopped, and silent."""
WITH, PLAIN = "with", ("plain", "plain again")
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


class PacedJob:
    """A job that runs only in its turns.

    Args:
        stack: ends the job.
        job: what it trains.
        name: of the job; with the plugin if it is WITH.
        iterations: in all.
        directory: for its files.
    """

    def __init__(self, stack: ExitStack, job: SmallJob, name: str, iterations: int, directory: Path) -> None:
        own = replace(job, more=tuple(word.replace(DIRECTORY, str(directory / name)) for word in job.more))
        path = directory / f"{name}.socket"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(0)
        self._listener = listener
        if name == WITH:
            command = own.under_resihp(iterations, directory / "run", SCRIPT, LAUNCH)
        else:
            command = own.under_torchrun(iterations, script=SCRIPT)
        self._output = directory / f"{name}.log"
        self.process = stack.enter_context(
            running(command, self._output, {"PACE": str(path), "DEVICE_S": str(DEVICE_S)})
        )
        stack.callback(self.go_on)  # who is stopped does not hear that it has to end
        self._count = job.workers
        self._workers: list[Any] = []

    def connect(self) -> None:
        """Wait until all workers have done their first iteration."""

        def accepted() -> bool | None:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return None
            connection.settimeout(TURN_S)
            self._workers.append(connection.makefile("rw"))
            return True

        while len(self._workers) < self._count:
            wait_for("start", accepted, self.process, START_S)
        self._until_done()

    def turn(self, iterations: int) -> float:
        """Run a number of iterations; returns their seconds."""
        began = time.monotonic()
        self._tell(iterations)
        return self._until_done() - began

    def finish(self, iterations: int) -> None:
        """Run the last iterations, and let the job end."""
        self._tell(iterations + 1)  # more than are left, so that nobody waits for another turn
        if self.process.wait(START_S) != 0:
            raise RuntimeError(f"a job ended with exit code {self.process.returncode}")

    def stop(self) -> None:
        signal_all(process_tree(self.process.pid), signal.SIGSTOP)

    def go_on(self) -> None:
        signal_all(process_tree(self.process.pid), signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """CPU seconds of all its present processes."""
        return TICK_S * sum(_ticks(pid) for pid in process_tree(self.process.pid))

    def _tell(self, iterations: int) -> None:
        for worker in self._workers:
            worker.write(f"{iterations}\n")
            worker.flush()

    def _until_done(self) -> float:
        times = [worker.readline() for worker in self._workers]
        if not all(times):
            last = self._output.read_text().splitlines()[-LAST_LINES:]
            raise RuntimeError("\n".join(["a worker has ended; the last that its job has said:", *last]))
        return max(map(float, times))


def _ticks(pid: int) -> int:
    """User and system time of a process in clock ticks."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0  # it has just ended
    return int(fields[11]) + int(fields[12])


def take_turns(jobs: dict[str, PacedJob], rounds: int) -> dict[str, list[float]]:
    """Seconds of each job's turns. All jobs are stopped, before and after."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    orders = itertools.cycle(itertools.permutations(jobs))
    for number, order in zip(range(rounds), orders, strict=False):
        for name in order:
            jobs[name].go_on()
            seconds[name].append(jobs[name].turn(TURN))
            jobs[name].stop()
        if number % 10 == 9:
            print(f"{number + 1} rounds", file=sys.stderr, flush=True)
    return seconds


def bounds_of_median(values: Sequence[float]) -> list[float]:
    """The two values between which the true median lies with probability CONFIDENCE."""
    count, below, probability = len(values), 0, 0.5 ** len(values)
    while 2 * probability <= 1 - CONFIDENCE:
        below += 1
        probability += math.comb(count, below) * 0.5**count
    ordered = sorted(values)
    return [ordered[max(below - 1, 0)], ordered[min(count - below, count - 1)]]


def percent(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """By how many percent the first of each pair exceeds the second: the median with its bounds."""
    ratios = [100 * (first / second - 1) for first, second in pairs]
    return {"median": statistics.median(ratios), "bounds": bounds_of_median(ratios)}


def measure(case: str, rounds: int, directory: Path) -> dict[str, Any]:
    iterations = WARM_UP + rounds * TURN + TURN
    with ExitStack() as stack:
        jobs = {name: PacedJob(stack, CASES[case], name, iterations, directory) for name in (PLAIN[0], WITH, PLAIN[1])}
        for job in jobs.values():
            job.connect()
            job.stop()
        for job in jobs.values():
            job.go_on()
            job.turn(WARM_UP - 1)
            job.stop()
        load, before = load_average(), {name: job.cpu_seconds() for name, job in jobs.items()}
        seconds = take_turns(jobs, rounds)
        cpu = {name: job.cpu_seconds() - before[name] for name, job in jobs.items()}
        for job in jobs.values():
            job.go_on()
            job.finish(TURN)
    plain = list(zip(*(seconds[name] for name in PLAIN), strict=True))
    overhead = percent([(own, statistics.mean(both)) for own, both in zip(seconds[WITH], plain, strict=True)])
    noise = percent(plain)
    return {
        "case": case,
        "overhead_percent": overhead["median"],
        "bounds": overhead["bounds"],
        "noise_percent": noise["median"],
        "noise_bounds": noise["bounds"],
        "cpu_percent": 100 * (cpu[WITH] / statistics.mean(cpu[name] for name in PLAIN) - 1),
        "iteration_s": {name: statistics.median(each) / TURN for name, each in seconds.items()},
        "rounds": rounds,
        "iterations": rounds * TURN,
        "workers": CASES[case].workers,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": load,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help=f"of {TURN} iterations of each job (default 60)")
    parser.add_argument("--case", choices=CASES, default="default", help="what is left on; by default nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="healthy-") as scratch:
        result = measure(options.case, options.rounds, Path(scratch))
    if result["overhead_percent"] > GOAL_PERCENT:
        print(f"more than {GOAL_PERCENT} %", file=sys.stderr)
    print_result(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
