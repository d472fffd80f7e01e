# SPDX-License-Identifier: Apache-2.0
"""The records of a running job, kept in its run directory. Imports `events` and this package's recordings."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from megatron_resihp.detector.input.recording import FILE_NAME, Recorder, RecordingError
from megatron_resihp.events.codec import plain
from megatron_resihp.events.detection import DetectionFailed
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import Job

MOST_KEPT: Final = 4 << 30
"""Most bytes of records kept with a run: 24 hours of 256 workers with iterations of ten seconds."""


class KeptRecords:
    """The records of one run. A full disk ends the recording and nothing else; each method returns what to log.

    Args:
        run_dir: where they are kept.
        taken_over: from a coordinator before this one.
    """

    def __init__(self, run_dir: Path, taken_over: bool = False) -> None:
        self._run_dir = run_dir
        self._taken_over = taken_over
        self._recorder: Recorder | None = None
        self._kept = 0

    def open(self, job: Job) -> list[Event]:
        """Begin the recording of a job."""
        try:
            known = {name: value for name, value in plain(job).items() if name != "event"}
            self._recorder = Recorder(self._run_dir / FILE_NAME, known, self._taken_over)
        except (OSError, RecordingError) as error:
            return [failed("recording", error)]
        return []

    def keep(self, message: bytes) -> list[Event]:
        """Keep a worker's message, unless there are too many bytes of them."""
        self._kept += len(message)
        if self._recorder is not None and self._kept > MOST_KEPT:
            error = OSError(f"the run's records take {MOST_KEPT >> 30} GiB; later ones are judged and not kept")
            return [*self.write(Recorder.close), self._stop(error)]
        return self.write(lambda recorder: recorder.message(message))

    def write(self, action: Callable[[Recorder], None]) -> list[Event]:
        """Have the recorder write, if there is one."""
        if self._recorder is None:
            return []
        try:
            action(self._recorder)
        except OSError as error:
            return [self._stop(error)]
        return []

    def _stop(self, error: Exception) -> Event:
        self._recorder = None
        return failed("recording", error)


def failed(part: str, error: Exception) -> DetectionFailed:
    """The event that a part of detection has failed."""
    return DetectionFailed(part=part, error=f"{type(error).__name__}: {error}")
