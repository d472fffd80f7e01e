# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py that writes down unrounded whatever Megatron logs, and waits where it is told to.

With and without the plugin. Each process writes RUN_DIR/logged/PID.jsonl: a line [tag, step, value] for each number. In
the iteration that RUN_DIR/hold says, workers wait for RUN_DIR/go_on; a worker that joins waits for RUN_DIR/join first.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY / "benchmarks")]

import pretrain_gpt  # noqa: E402
from megatron.training import get_args, training  # noqa: E402

from recipe_runs.filling import read_letters  # noqa: E402

WAIT_S = 60.0


class Recorder:
    """In the place of a TensorBoard writer, which it hands everything on to."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)  # what is written is there when the process is killed
        self.plain: Any = None

    def add_scalar(self, tag: str, value: Any, step: int, *others: Any, **options: Any) -> None:
        self.note(tag, value, step)
        if self.plain is not None:
            self.plain.add_scalar(tag, value, step, *others, **options)

    def note(self, tag: str, value: Any, step: int) -> None:
        self._file.write(json.dumps([tag, int(step), None if value is None else float(value)]) + "\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name) if self.plain is not None else lambda *_arguments, **_options: None


def record(recorder: Recorder) -> None:
    """Let Megatron's training log write to the recorder, on every worker."""
    get_writer = training.get_tensorboard_writer

    def get_recorder() -> Recorder:
        recorder.plain = get_writer()
        return recorder

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def training_log(*positional: Any, **options: Any) -> Any:
            iteration, loss_scale, _, skipped = positional[3:7]
            recorder.note("loss scale", loss_scale, iteration)
            recorder.note("skipped", skipped, iteration)
            return original(*positional, **options)

        return training_log

    training.get_tensorboard_writer = get_recorder
    training.training_log = noting(training.training_log)


def hold_in_forward(run_dir: Path) -> None:
    """Wait in the iteration in which the others shall join."""
    plain = pretrain_gpt.forward_step
    iteration = int((run_dir / "hold").read_text())

    def forward_step(*positional: Any, **options: Any) -> Any:
        if get_args().curr_iteration + 1 == iteration:
            wait_for(run_dir / "go_on")
        return plain(*positional, **options)

    pretrain_gpt.forward_step = forward_step


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def main() -> None:
    run_dir = Path(os.environ.get("RESIHP_RUN_DIR") or os.environ["RUN_DIR"])
    record(Recorder(run_dir / "logged" / f"{os.getpid()}.jsonl"))
    if "--fim-data" in sys.argv:
        read_letters(pretrain_gpt, with_plugin="--resihp" in sys.argv)
    if (run_dir / "hold").exists():
        hold_in_forward(run_dir)
        if int(os.environ.get("RESIHP_WORKER", 0)) >= int(os.environ.get("RESIHP_SLOTS", 1)):
            wait_for(run_dir / "join")
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
