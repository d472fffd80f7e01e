#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long a killed worker stops training: in place, and with torchrun restarting from checkpoints.

    python benchmarks/recovery.py [--family dense|moe] [--kills N] [--quick] [--plot FILE]

Eight CPU workers train a tiny GPT in fp32: dense with TP 2, PP 2, DP 2, or with experts and EP 4, DP 8. One is killed
with SIGKILL from outside, at a random point of an iteration; victims take turns in an order drawn from --seed.

In place, one job for each kill, so that it always strikes eight workers. What `in_place_s`, `in_place_with_redo_s` and
`phases` are is said in kills.py.

The incumbent is torchrun with a checkpoint after each iteration: from the kill to when the log shows an iteration that
was completed after the restart. It redoes one iteration at most, and is compared with `in_place_with_redo_s`.

All numbers are medians over the kills, in seconds. The last line of standard output is one JSON object.
"""

import argparse
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from common import EXPERTS, SmallJob, print_result, running, wait_for, words_of, worker_processes
from kills import PHASES, Kill, kill_in_place

GOALS: Final = {"dense": 0.6, "moe": 0.7}
"""Seconds of `in_place_s`."""
JOBS: Final = {
    "dense": SmallJob(),
    "moe": SmallJob(1, 1, 8, batch=16, more=words_of({**EXPERTS, "expert-model-parallel-size": 4})),
}
RESTART_S = 240.0
ITERATION_LINE = re.compile(rb"iteration +(\d+)/")
TRAINING_STARTS = b"[before the start of training step]"


# ---- the incumbent


def kill_under_torchrun(
    job: SmallJob, victims: Sequence[int], fractions: Sequence[float], directory: Path, say: Callable[[str], None]
) -> list[float]:
    """Kill workers of one job, one after another, each well after torchrun has restarted it; returns the recovery
    times.

    Raises:
        RuntimeError: the job was not restarted, or not from its last checkpoint.
    """
    output, checkpoints = directory / "output", directory / "checkpoints"
    saving = ["--save", str(checkpoints), "--load", str(checkpoints), "--save-interval", "1", "--ckpt-format", "torch"]
    command = [*job.under_torchrun(1000, len(victims)), *saving]
    took_s = []
    with running(command, output) as launcher:
        seen = 0
        for victim, fraction in zip(victims, fractions, strict=True):
            reached = wait_for("warm-up", lambda: _logged(output, seen, 6), launcher, RESTART_S)  # noqa: B023
            pid = worker_processes(launcher.pid)[victim]
            time.sleep(fraction * _iteration_time(output))
            seen = output.stat().st_size
            killed_at = time.time()
            os.kill(pid, signal.SIGKILL)
            resumed = wait_for("restart", lambda: _logged(output, seen, 1), launcher, RESTART_S)  # noqa: B023
            took_s.append(time.time() - killed_at)
            say(f"torchrun: worker {victim} killed, iteration {resumed[-1]} done {took_s[-1]:.1f} s after it")
            if resumed[-1] < reached[-1]:
                raise RuntimeError(f"torchrun went back to iteration {resumed[-1]} from {reached[-1]}")
    return took_s


def _logged(output: Path, offset: int, count: int) -> list[int] | None:
    """Numbers of the iterations logged since training last began, once there are `count` after `offset`."""
    with output.open("rb") as file:
        file.seek(offset)
        _, started, log = file.read().rpartition(TRAINING_STARTS)
    iterations = [int(number) for number in ITERATION_LINE.findall(log)] if started else []
    return iterations if len(iterations) >= count else None


def _iteration_time(output: Path) -> float:
    times = re.findall(rb"elapsed time per iteration \(ms\): ([0-9.]+)", output.read_bytes())
    return statistics.median(float(each) for each in times) / 1000


# ---- the result


def summarize(kills: Sequence[Kill], incumbent: Sequence[float]) -> dict[str, Any]:
    """The medians, with the values behind them."""
    phases = {name: statistics.median(kill.phases[name] for kill in kills) for name in PHASES}
    with_redo_s = statistics.median(kill.in_place_with_redo_s for kill in kills)
    incumbent_s = statistics.median(incumbent) if incumbent else None
    return {
        "in_place_s": statistics.median(kill.in_place_s for kill in kills),
        "in_place_with_redo_s": with_redo_s,
        "incumbent_s": incumbent_s,
        "ratio": incumbent_s / with_redo_s if incumbent_s is not None else None,
        "phases": phases,
        "longest": {name: statistics.median(kill.longest[name] for kill in kills) for name in PHASES[1:-1]},
        "kills": len(kills),
        "incumbent_kills": len(incumbent),
        "iteration_s": statistics.median(kill.iteration_s for kill in kills),
        "load_average": statistics.median(kill.load_average for kill in kills),
        "slowest_phase": max(phases, key=phases.__getitem__),
        "cores": len(os.sched_getaffinity(0)),
        "each": [asdict(kill) for kill in kills],
        "incumbent_each_s": list(incumbent),
    }


def draw(result: dict[str, Any], goal_s: float, path: Path) -> None:
    """The phases of the recovery, stacked, with the incumbent on the same axis; below, the phases alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (both, alone) = pyplot.subplots(2, 1, figsize=(9, 4.2), layout="constrained")
    phases = {**result["phases"], "redone iteration": result["in_place_with_redo_s"] - result["in_place_s"]}
    colours = [pyplot.get_cmap("tab10")(number) for number in range(len(phases))]
    for axes in (both, alone):
        left = 0.0
        for (name, seconds), colour in zip(phases.items(), colours, strict=False):
            axes.barh("in place", max(seconds, 0.0), left=left, color=colour, label=name)
            left += max(seconds, 0.0)
        axes.spines[["top", "right"]].set_visible(False)
    if result["incumbent_s"] is not None:
        both.barh("torchrun", result["incumbent_s"], color="0.6")
    alone.axvline(goal_s, color="black", linestyle=":")
    alone.set_xlabel("seconds from SIGKILL to the end of the first iteration after it")
    alone.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.4), frameon=False)
    both.set_title(f"A killed worker of 8 on {result['cores']} cores, median of {result['kills']} kills")
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=JOBS, default="dense", help="the job (default dense)")
    parser.add_argument("--kills", type=int, default=5, help="kills in place (default 5)")
    parser.add_argument("--incumbent-kills", type=int, default=5, help="kills under torchrun (default 5)")
    parser.add_argument("--quick", action="store_true", help="one kill, no incumbent")
    parser.add_argument("--seed", type=int, default=1, help="of victims and moments (default 1)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result")
    options = parser.parse_args()
    if options.quick:
        options.kills, options.incumbent_kills = 1, 0
    job, goal_s, chance = JOBS[options.family], GOALS[options.family], random.Random(options.seed)
    victims = [v for _ in range(options.kills + options.incumbent_kills) for v in chance.sample(range(8), 8)]

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    kills, incumbent = [], []
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch:
        for number in range(options.kills):
            directory = Path(scratch, str(number))
            directory.mkdir()
            kill, _ = kill_in_place(job, victims[number], chance.random(), directory)
            say(f"in place: worker {kill.victim} killed, {kill.in_place_s:.3f} s, "
                f"{kill.in_place_with_redo_s:.3f} s with the iteration{' redone' if kill.redone else ''}, "
                f"load {kill.load_average}")  # fmt: skip
            kills.append(kill)
        if options.incumbent_kills:
            fractions = [chance.random() for _ in range(options.incumbent_kills)]
            directory = Path(scratch, "torchrun")
            directory.mkdir()
            incumbent = kill_under_torchrun(job, victims[-options.incumbent_kills :], fractions, directory, say)
    result = {"family": options.family, **summarize(kills, incumbent)}
    if options.plot:
        draw(result, goal_s, options.plot)
    if result["in_place_s"] > goal_s:
        slowest = result["slowest_phase"]
        say(f"slower than {goal_s} s: {slowest} took {result['phases'][slowest]:.3f} s")
    print_result(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
