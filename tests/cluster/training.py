# SPDX-License-Identifier: Apache-2.0
"""A job of a tiny model that scripts/slurm/job.sbatch runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jobs import JOB_ENVIRONMENT, REPOSITORY, WISHING, tiny
from slurm import Slurm

from megatron_resihp.events.log import FILE_NAME, read_events
from megatron_resihp.report.run.summary import RunSummary, summarize_log

ITERATIONS = 12
HELD = 6
"""Worker 0 waits in this iteration until the test says `go_on`."""
ARGUMENTS = tiny(global_batch_size=6, train_iters=ITERATIONS)
EVENT_S = 180.0
RESIHP = Path(sys.executable).with_name("resihp")


class Training:
    """One job, from its submission on. Worker 0 waits in iteration HELD.

    Args:
        directory: that it is submitted from.
        options: of sbatch.
        environment: variables for the batch script.
    """

    def __init__(
        self, slurm: Slurm, directory: Path, nodes: int, options: Sequence[str] = (), **environment: str
    ) -> None:
        self._slurm = slurm
        self.directory = directory
        self._environment: Mapping[str, str] = {
            **JOB_ENVIRONMENT, "RESIHP_BIN": str(RESIHP.parent), "RESIHP_LAUNCH": "--stand-in", **environment
        }  # fmt: skip
        command = [str(WISHING), *ARGUMENTS, "--save", str(directory / "checkpoints"), "--save-interval", "100"]
        self.number = self.submit("job.sbatch", *command, nodes=nodes, options=options)
        self.run_dir = directory / "resihp-runs" / f"slurm-{self.number}"
        self.wish(f"hold-0-{HELD}")

    def submit(self, script: str, *arguments: str, nodes: int, options: Sequence[str] = ()) -> int:
        """Submit one of the shipped scripts from the job's directory. `options`: of sbatch."""
        path = REPOSITORY / "scripts" / "slurm" / script
        options = [f"--nodes={nodes}", "--gpus-per-node=1", "--signal=USR1@5", *options]
        return self._slurm.submit(
            *options, str(path), *arguments, directory=self.directory, environment=self._environment
        )

    def wish(self, what: str) -> None:
        (self.run_dir / "wishes").mkdir(parents=True, exist_ok=True)
        (self.run_dir / "wishes" / what).touch()

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / FILE_NAME
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def pid(self, worker: int) -> int:
        """The process of a worker."""
        (started,) = (event for event in self.events("worker_started") if event["worker"] == worker)
        return int(started["pid"])

    def await_event(self, name: str, count: int = 1, **fields: Any) -> None:
        """Wait until there are so many events with these fields."""
        self._slurm.eventually(
            f"{name} {fields} of job {self.number}",
            lambda: sum(fields.items() <= event.items() for event in self.events(name)) >= count,
            EVENT_S,
        )

    def end(self) -> dict[str, str]:
        """Wait until it is over; what SLURM says of it then."""
        over = ("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", "TIMEOUT")
        return self._slurm.await_state(self.number, *over, timeout_s=EVENT_S)

    @cached_property
    def summary(self) -> RunSummary:
        """What the report says of the last run in its run directory."""
        return summarize_log(read_events(self.run_dir / FILE_NAME))

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("resihp-*.log")))
