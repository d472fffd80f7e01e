# SPDX-License-Identifier: Apache-2.0
"""Launches a job of the plugin on one GPU: a launcher with one worker for each worker, all on device 0.

Imports the standard library and the plugin's reports.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from setting import REPOSITORY, Setting, end_all, python

from megatron_resihp.events.log import FILE_NAME, read_events
from megatron_resihp.report.run.run_summary import RunSummary
from megatron_resihp.report.run.summary import summarize

SCRIPT: Final = REPOSITORY / "scripts" / "pretrain_gpt.py"
JOB_S: Final = 150.0
TAIL_LINES: Final = 6
MODEL: Final[Mapping[str, Any]] = {
    "num-layers": 2, "hidden-size": 256, "num-attention-heads": 8, "seq-length": 256, "micro-batch-size": 1,
    "global-batch-size": 8, "train-iters": 12, "vocab-size": 1000,
}  # fmt: skip
REHEARSED: Final[Mapping[str, Any]] = {"hidden-size": 32, "num-attention-heads": 4, "seq-length": 32, "vocab-size": 64}
ALWAYS: Final = (
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 2 --split 98,1,1 --tokenizer-type NullTokenizer "
    "--num-workers 0 --eval-iters 0 --eval-interval 1000 --log-interval 1 --transformer-impl local "
    "--attention-backend unfused --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --disable-jit-fuser "
    "--resihp --resihp-record-samples"
).split()


class Launched:
    """A job that has ended, or was ended because it took too long.

    Attributes:
        codes: exit codes of its launchers; None for one that had to be killed.
        run_dir: what it left behind.
        summary: what its event log says.
    """

    def __init__(self, codes: Sequence[int | None], run_dir: Path) -> None:
        self.codes = list(codes)
        self.run_dir = run_dir
        self.summary: RunSummary = summarize(read_events(run_dir / FILE_NAME).events)

    def tail(self) -> list[str]:
        """The last lines that its first launcher printed."""
        return (self.run_dir.parent / "node0").read_text(errors="replace").splitlines()[-TAIL_LINES:]


def launch(
    setting: Setting, name: str, workers: int, flags: Sequence[str], script: Path = SCRIPT,
    data: Sequence[str] = ("--mock-data",), **model: Any,
) -> Launched:  # fmt: skip
    """Run a job to its end.

    Args:
        flags: beside those of all jobs.
        data: flags that say what is read; none if `flags` do.
        model: what differs from MODEL.
    """
    folder = setting.out / name
    folder.mkdir(parents=True)
    port, words = _free_port(), [*_flags(setting, model), *data, *flags]
    processes = [
        subprocess.Popen(
            [*_command(setting, folder / "run", workers, node, port), str(script), *words],
            cwd=REPOSITORY, env=setting.environment(), stdout=(folder / f"node{node}").open("w"),
            stderr=subprocess.STDOUT,
        )
        for node in range(workers)
    ]  # fmt: skip
    deadline = time.monotonic() + setting.limit(JOB_S)
    try:
        codes = [_await(process, deadline) for process in processes]
    finally:
        end_all(processes)
    return Launched(codes, folder / "run")


def _command(setting: Setting, run_dir: Path, workers: int, node: int, port: int) -> list[str]:
    options = ["--nproc-per-node", "1", "--run-dir", str(run_dir)]
    # Workers that start on few cores are silent for longer.
    options += ["--heartbeat-timeout", "30" if setting.stand_in else "10", "--survivor-timeout", "40"]
    if workers > 1:
        options += ["--nnodes", str(workers), "--node-rank", str(node), "--coordinator", f"127.0.0.1:{port}"]
    if setting.stand_in:
        options.append("--stand-in")
    return [*python("-m", "megatron_resihp.cli", "launch"), *options]


def _flags(setting: Setting, model: Mapping[str, Any]) -> list[str]:
    values = {**MODEL, **(REHEARSED if setting.stand_in else {}), **model}
    values["max-position-embeddings"] = values["seq-length"]
    pairs = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*pairs, *ALWAYS, "--distributed-backend", setting.backend]


def _await(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return None


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
