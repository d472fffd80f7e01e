#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What copies of experts and of other parts of the optimizer's state cost a job that nothing happens to.

    python benchmarks/copies.py [--family dense|moe|experts] [--iterations N] [--time-scale S]

Eight CPU workers train a tiny GPT on the emulated clock of throughput.py: `dense` with the distributed optimizer and
DP 8, `moe` with it and EP 8, so that each expert lives once, `experts` with EP 8 and without it. Each worker keeps a
copy of another one's part, or experts. The figures are those that workers tell at the end of training in the event
`optimizer_copy`, by worker:

- `bytes_per_step`: gradients that it sends to the copy of its part. `bytes_kept`: what its copy takes of host memory.
- `exchange_s`: seconds of a step until both gradients have passed, waits for others included. Training waits for it.
- `step_s`: seconds of processor time or waiting in which it steps the copy, beside training.
- `cost_percent`: the longest exchange over the median iteration, of which ops take what they would on the device.

These bytes are of the tiny model. Of one as wide as the emulated device's, DEVICE_HIDDEN, parts would have
`device_bytes_per_step`, as parameters grow with the square of the width. Sent to another node in one piece after all
gradients are summed, and next to nothing else, they would take `device_exchange_s` on the emulated clock, and
`device_cost_percent` of the iteration.

The last line of standard output is one JSON object.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from common import EXPERTS, add_time_scale, all_events, load_average, print_result, running
from throughput_jobs import FAMILIES, Family

from megatron_resihp.cost.profile import DeviceProfile
from megatron_resihp.events.event import Event
from megatron_resihp.events.training import Iteration, OptimizerCopy

GOAL_PERCENT: Final = 1.0
TIME_SCALE: Final = 0.5
ITERATIONS: Final = 8
DEVICE_HIDDEN: Final = 8192
"""Width of the model whose layers' times the emulated device has."""
JOB_S: Final = 1200.0
LAUNCH: Final = ("--heartbeat-timeout", "600")
HELD_ONCE: Final[dict[str, Any]] = {**EXPERTS, "expert-model-parallel-size": 8}
SHARED_OUT: Final[dict[str, Any]] = {"use-distributed-optimizer": True}
FEW: Final = replace(FAMILIES["moe"].job, batch=32)
JOBS: Final[Mapping[str, Family]] = {
    "dense": Family(FEW, (), {}, flags=SHARED_OUT, sequence=8192),
    "moe": Family(FEW, (), {}, flags=HELD_ONCE | SHARED_OUT, sequence=8192, experts=8),
    "experts": Family(FEW, (), {}, flags=HELD_ONCE, sequence=8192, experts=8),
}


def train(family: Family, iterations: int, time_scale: float, directory: Path) -> list[Event]:
    """Run the job; returns its events.

    Raises:
        RuntimeError: it failed.
    """
    profile = directory / "profile.json"
    profile.write_text(json.dumps(family.profile(time_scale)))
    command = family.command_job.under_resihp(iterations, directory / "run", options=LAUNCH)
    with running([*command, "--resihp-emulate", str(profile)], directory / "output") as job:
        if job.wait(JOB_S) != 0:
            raise RuntimeError(f"the job failed: {(directory / 'output').read_text()[-500:]}")
    return all_events(directory / "run")


def summarize(events: Sequence[Event], profile: DeviceProfile, hidden: int) -> dict[str, Any]:
    """The figures of a run.

    Args:
        profile: of the emulated device.
        hidden: width of the model that was trained.

    Raises:
        RuntimeError: no worker has told of a copy.
    """
    copies = [event for event in events if isinstance(event, OptimizerCopy)]
    if not copies:
        raise RuntimeError("no worker has kept a copy")
    seconds = [event.duration_s for event in events if isinstance(event, Iteration) and event.duration_s is not None]
    iteration_s = statistics.median(seconds[1:])
    sent, exchange_s = max(each.bytes_per_step for each in copies), max(each.exchange_s for each in copies)
    at_scale = sent * (DEVICE_HIDDEN / hidden) ** 2
    device_s = profile.time_scale * profile.between_nodes.seconds(at_scale)
    return {
        "iteration_s": iteration_s,
        "iterations": len(seconds) - 1,
        "copies": len(copies),
        "bytes_per_step": sent,
        "bytes_kept": max(each.bytes_kept for each in copies),
        "exchange_s": exchange_s,
        "step_s": max(each.step_s for each in copies),
        "cost_percent": 100 * exchange_s / iteration_s,
        "device_bytes_per_step": at_scale,
        "device_exchange_s": device_s,
        "device_cost_percent": 100 * device_s / iteration_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=JOBS, default="moe", help="the job (default moe)")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help=f"in all (default {ITERATIONS})")
    add_time_scale(parser, TIME_SCALE)
    options = parser.parse_args()
    family = JOBS[options.family]
    with tempfile.TemporaryDirectory(prefix="copies-") as scratch:
        events = train(family, options.iterations, options.time_scale, Path(scratch))
    profile = DeviceProfile.from_dict(family.profile(options.time_scale))
    result = {"family": options.family, "goal_percent": GOAL_PERCENT, "time_scale": options.time_scale,
              **summarize(events, profile, family.job.hidden), "load_average": load_average()}  # fmt: skip
    if result["cost_percent"] > GOAL_PERCENT:
        print(f"more than {GOAL_PERCENT:g} %", file=sys.stderr)
    print_result(result, 5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
