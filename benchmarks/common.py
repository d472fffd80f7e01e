# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmarks: their small job, its processes as seen from outside, and the output of results.

May import the standard library and `megatron_resihp.report`; no torch, no megatron, so that measuring costs the job
nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron_resihp.events.codec import read_event
from megatron_resihp.events.event import Event
from megatron_resihp.events.log import FILE_NAME, read_events

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"
POLL_S = 0.005
EXPERTS: Final[Mapping[str, Any]] = {
    "num-experts": 8, "moe-ffn-hidden-size": 32, "moe-router-topk": 2,
    "moe-router-load-balancing-type": "aux_loss", "moe-aux-loss-coeff": 0.01, "disable-bias-linear": True,
    "expert-tensor-parallel-size": 1, "moe-token-dispatcher-type": "alltoall",
}  # fmt: skip
"""Megatron's flags of layers with experts, by name."""
END_S = 30.0
"""How long a job may take to end after it was asked to."""


def add_part(parser: argparse.ArgumentParser) -> None:
    """The option --part, for `of_part`."""
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="every N-th one from the I-th on")


def _part(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text} is no part; give I/N, with I from 1 to N")
    return int(number), int(count)


def of_part[Item](items: Sequence[Item], part: tuple[int, int]) -> list[Item]:
    """Those of a part."""
    number, count = part
    return list(items[number - 1 :: count])


def add_time_scale(parser: argparse.ArgumentParser, default: float) -> None:
    """The option --time-scale."""
    parser.add_argument(
        "--time-scale", type=float, default=default,
        help=f"seconds of the emulated clock per second of the device (default {default})",
    )  # fmt: skip


def words_of(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Flags by name → as on a command line. True stands for a flag without a value."""
    each = ((f"--{name}", *(() if value is True else (str(value),))) for name, value in flags.items())
    return tuple(word for words in each for word in words)


@dataclass(frozen=True)
class SmallJob:
    """Megatron's flags of a tiny GPT in fp32 on invented data, with Megatron's default number of data loaders.

    Attributes:
        more: flags besides.
    """

    tensor_parallel: int = 2
    pipeline_parallel: int = 2
    replicas: int = 2
    layers: int = 4
    hidden: int = 64
    sequence: int = 128
    batch: int = 8
    more: tuple[str, ...] = ()

    @property
    def workers(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.replicas

    def flags(self, iterations: int) -> list[str]:
        sizes = {
            "tensor-model-parallel-size": self.tensor_parallel, "pipeline-model-parallel-size": self.pipeline_parallel,
            "num-layers": self.layers, "hidden-size": self.hidden, "num-attention-heads": 4,
            "seq-length": self.sequence, "max-position-embeddings": self.sequence,
            "micro-batch-size": 1, "global-batch-size": self.batch, "train-iters": iterations,
            "vocab-size": 127, "lr": 1e-3, "split": "98,1,1", "eval-iters": 0, "eval-interval": iterations,
            "log-interval": 1, "hidden-dropout": 0, "attention-dropout": 0,
            "transformer-impl": "local", "tokenizer-type": "NullTokenizer", "distributed-backend": "gloo",
        }  # fmt: skip
        flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        return [*flags, "--mock-data", "--no-gradient-accumulation-fusion", *self.more]

    def under_resihp(
        self, iterations: int, run_dir: Path, script: Path = SCRIPT, options: Sequence[str] = ()
    ) -> list[str]:
        """The command that starts the job with the plugin, on CPUs. `options`: of `resihp launch`."""
        launch = [sys.executable, "-m", "megatron_resihp.cli", "launch", "--stand-in"]
        seats = ["--nproc-per-node", str(self.workers), "--run-dir", str(run_dir)]
        return [*launch, *seats, *options, str(script), "--resihp", *self.flags(iterations)]

    def under_torchrun(self, iterations: int, restarts: int = 0, script: Path = SCRIPT) -> list[str]:
        """The command that starts the same job without the plugin, on CPUs."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", str(restarts)]
        seats = ["--nproc-per-node", str(self.workers), "-m", "megatron_resihp.cpu"]
        return [*launch, *seats, str(script), *self.flags(iterations)]


@contextmanager
def running(
    command: Sequence[str], output: Path, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A job in a session of its own with its output in a file; whatever is left of it at the end is ended, also where
    this process is told to end.

    Args:
        variables: of its environment, beside this process's own.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore",
        # torchrun shares one store between its attempts, and torch 2.15's gloo then meets the addresses of the dead
        # attempt ("connectFullMesh failed: Connection refused"): without a new store no restart ever works.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **(variables or {}),
    }  # fmt: skip
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with output.open("wb") as file:
        job = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield job
    finally:
        _end(job)


def _end(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is not None:
        return
    workers = worker_processes(job.pid)
    job.send_signal(signal.SIGTERM)
    try:
        job.wait(END_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
        signal_all(workers.values(), signal.SIGKILL)


def worker_processes(launcher: int) -> dict[int, int]:
    """Process ids of a launcher's workers by their number, as their environments say it."""
    found: dict[int, int] = {}
    for pid in _children(launcher):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        found.update({int(item[5:]): pid for item in environment if item.startswith(b"RANK=")})
    return found


def process_tree(pid: int) -> list[int]:
    """A process and its living descendants."""
    return [pid, *(each for child in _children(pid) for each in process_tree(child))]


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes, of which some may have ended."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _children(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in children.read_text().split()]
        except OSError:
            continue  # the thread has just ended
    return found


def wait_for[T](what: str, look: Callable[[], T | None], job: subprocess.Popen[bytes], timeout_s: float) -> T:
    """The first result of `look` that is not None.

    Raises:
        RuntimeError: the job ended, or the time is over.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        ended = job.poll() is not None
        found = look()
        if found is not None:
            return found
        if ended or time.monotonic() > deadline:
            raise RuntimeError(f"{what}: {'the job has ended' if ended else f'not within {timeout_s:g} s'}")
        time.sleep(POLL_S)


class EventTail:
    """The events of a run as they are written."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._offset = 0
        self.events: list[Event] = []

    def look(self) -> list[Event]:
        """All events so far."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self.events
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.events += [read_event(json.loads(line)) for line in whole.splitlines() if line.strip()]
        return self.events


def all_events(run_dir: Path) -> list[Event]:
    return read_events(run_dir / FILE_NAME).events


def load_average() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def rounded(value: Any, digits: int = 3) -> Any:
    """Nested dicts and lists with their numbers rounded to measurable digits."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    return [rounded(item, digits) for item in value] if isinstance(value, list) else value


def print_result(result: dict[str, Any], digits: int = 3) -> None:
    """The result as JSON in the last line of standard output."""
    print(json.dumps(rounded(result, digits)), flush=True)
