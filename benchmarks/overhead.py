# SPDX-License-Identifier: Apache-2.0
"""The cost of measuring: the probes' share of the training thread's time, and how many workers' messages a second the
coordinator judges on one core.

`probe_us_per_op` is what 8 micro-batches take longer with the probes, over their 16 ops: in each a worker in the middle
of a pipeline receives, sends and takes part in 8 tensor-parallel collectives. All that stands for Megatron, torch and
gloo does nothing. Median of 200 iterations; seconds are CPU time, throughout.
`overhead_percent` is the same on a GPU, with real work, as a share of the iteration; null where there is none.
`messages_per_s` is the whole of what the coordinator does with each message, after warm-up (`coordinator_cost.py`).

May import the standard library and `probe_cost`, which imports everything.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import load_average, print_result
from probe_cost import measure_probes

GOAL_MESSAGES_PER_S = 10_000
GOAL_PROBE_US_PER_OP = 20
COORDINATOR = Path(__file__).resolve().parent / "coordinator_cost.py"


def measure_coordinator(replicas: int) -> dict[str, Any]:
    """The output of `coordinator_cost.py`, run in a process that is bound to one core."""
    core = max(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, str(COORDINATOR), "--replicas", str(replicas)],
        stdout=subprocess.PIPE, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=79, help="replicas of 128 workers (default 79: 10,112 workers)")
    options = parser.parse_args()
    result = measure_probes() | measure_coordinator(options.replicas)
    result["load_average"] = load_average()
    if result["probe_us_per_op"] > GOAL_PROBE_US_PER_OP:
        print(f"the probes take more than {GOAL_PROBE_US_PER_OP} microseconds for each op", file=sys.stderr)
    if result["messages_per_s"] < GOAL_MESSAGES_PER_S:
        print(f"fewer than {GOAL_MESSAGES_PER_S} messages a second", file=sys.stderr)
    print_result(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
