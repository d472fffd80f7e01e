# SPDX-License-Identifier: Apache-2.0
"""The cost of judging for the coordinator: all its work on the records of a job of 10,000 synthetic workers.

For `overhead.py`, which runs it in a process of its own that is held on one core. `DetectionService.take` is called for
each message as `control.head.detection` does: record to disk, unpack, assemble, judge. Reading the messages from the
agents' connections is not in it. Only what follows warm-up counts; warm-up's end, where costs are fitted, is told
apart. Seconds are CPU time of the whole process. May import numpy and `megatron_resihp` without torch.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from common import print_result
from synthetic_workers import ITERATION_S, TENSOR_PARALLEL, SyntheticWorkers

from megatron_resihp.detector.input.join import Joiner
from megatron_resihp.detector.input.recording import Recorder
from megatron_resihp.detector.input.wire import unpack
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.service import DetectionService
from megatron_resihp.detector.settings import Settings
from megatron_resihp.events.detection import Detection
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import Job, RunStarted

WARM_UP: Final = Settings.skipped + Settings.warm_up
MEASURED: Final = 56
"""Iterations: whole rounds of what is done in every 7th (costs) and in every 8th (noise and thresholds)."""
AGAIN: Final = 8
"""Iterations of messages that are unpacked and recorded once more, to time that by itself."""


class Stopwatch:
    """CPU seconds of this process, by name, and what they were on the wall's clock and in other threads than this."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.wall_s = self.elsewhere_s = 0.0

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Time the work in this context."""
        wall, own, whole = time.monotonic(), time.thread_time(), time.process_time()
        yield
        whole = time.process_time() - whole
        self.seconds.setdefault(name, []).append(whole)
        self.elsewhere_s += max(whole - (time.thread_time() - own), 0.0)
        self.wall_s += time.monotonic() - wall

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its calls timed."""

        def timed(*args: Any, **options: Any) -> Any:
            with self.running(name):
                return function(*args, **options)

        return timed

    def total(self, name: str) -> float:
        return sum(self.seconds[name])


class Coordinator:
    """A detection service, and the messages of successive iterations.

    Args:
        workers: who sends.
        directory: where records are kept.

    Attributes:
        events: what the service said.
        sent: how many messages it was given.
    """

    def __init__(self, workers: SyntheticWorkers, directory: Path) -> None:
        self._workers = workers
        self._service = DetectionService(directory, lambda order: None)
        self._iteration = 0
        self.events: list[Event] = []
        self.sent = 0
        nodes = workers.count // TENSOR_PARALLEL
        self._service.note(RunStarted(world_size=workers.count, nproc_per_node=TENSOR_PARALLEL, most_nodes=nodes))
        self._service.note(Job(train_iters=100_000))
        self._service.note(EpochStarted(epoch=0, plan=workers.plan().to_dict()))

    def run(self, iterations: int, watch: Stopwatch) -> None:
        """Make the messages of each iteration, and time what the service does with them."""
        for _ in range(iterations):
            self._iteration += 1
            messages = self._workers.messages(self._iteration)
            now = ITERATION_S * self._iteration
            with watch.running("whole"):
                for message in messages:
                    self.events += self._service.take(message, now)
                self.events += self._service.look(now)
            self.sent += len(messages)

    def finish(self) -> None:
        """Raises RuntimeError if it did not judge all that it was given, or found something in healthy workers."""
        self.events += self._service.finish()
        expected = Detection(iterations=self._iteration, records=self.sent, faults={}, warm=True)
        seen = [replace(event, held_up_s=None) for event in self.events if isinstance(event, Detection)]
        if len(self.events) > 1 or seen != [expected]:
            raise RuntimeError(f"instead of {expected} alone the detector said {self.events}")


def measure(replicas: int, directory: Path) -> dict[str, Any]:
    """Messages per second, the time of each part, and memory."""
    workers = SyntheticWorkers(replicas)
    coordinator = Coordinator(workers, directory)
    warm_up, judging, parts = Stopwatch(), Stopwatch(), Stopwatch()
    coordinator.run(WARM_UP, warm_up)
    before = coordinator.sent
    with (
        patch.object(Joiner, "join", parts.around("join", Joiner.join)),
        patch.object(Monitor, "observe", parts.around("judge", Monitor.observe)),
    ):
        coordinator.run(MEASURED, judging)
    count, seconds = coordinator.sent - before, judging.total("whole")
    resident = memory("VmRSS")
    coordinator.finish()
    return {
        "messages_per_s": count / seconds,
        "workers": workers.count,
        "iterations_per_s": MEASURED / seconds,
        "longest_iteration_s": max(judging.seconds["whole"]),
        "us_per_message": {name: 1e6 * each / count for name, each in _parts(workers, directory, seconds, parts)},
        "warm_up_messages_per_s": (before - workers.count) / sum(warm_up.seconds["whole"][:-1]),
        "warm_up_end_s": warm_up.seconds["whole"][-1],
        "largest_message_bytes": max(map(len, workers.messages(1))),
        "other_threads_s": judging.elsewhere_s,
        "wall_s": judging.wall_s,
        "cpu_s": seconds,
        "resident_bytes": resident,
        "peak_resident_bytes": memory("VmHWM"),
    }


def _parts(workers: SyntheticWorkers, directory: Path, seconds: float, parts: Stopwatch) -> Iterator[tuple[str, float]]:
    """Names and seconds of the parts. Parts too short to be timed inside are timed again separately."""
    recorder = Recorder(directory / "again.bin", {})
    for iteration in range(1, AGAIN + 1):
        messages = workers.messages(iteration)
        with parts.running("unpack"):
            for message in messages:
                unpack(message)
        with parts.running("record"):
            for message in messages:
                recorder.message(message)
    recorder.close()
    unpacking, recording = (parts.total(name) * MEASURED / AGAIN for name in ("unpack", "record"))
    judging = parts.total("judge")
    yield "unpack", unpacking
    yield "assemble", seconds - unpacking - recording - judging
    yield "of_which_join", parts.total("join")
    yield "judge", judging
    yield "record", recording


def memory(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"the system does not tell {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=79, help="replicas of 128 workers (default 79: 10,112 workers)")
    replicas = parser.parse_args().replicas
    with tempfile.TemporaryDirectory() as directory:
        print_result(measure(replicas, Path(directory)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
