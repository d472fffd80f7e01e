# SPDX-License-Identifier: Apache-2.0
"""Files of TensorBoard and W&B where a coordinator takes over: each step is there once, read by their own libraries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.control.head.logs.own_curves import OwnPage
from megatron_resihp.control.head.logs.tensorboard_files import TensorBoardFiles
from megatron_resihp.control.head.logs.writer import Term
from megatron_resihp.protocol.logs import LogPage, Scalar, TensorBoardWish, Text

pytest.importorskip("tensorboard")

TERM = Term("a run")
TAGS = ("lm loss", "lm loss vs samples", "grad-norm")


def page(iteration: int, call: int = 0, tags: Sequence[str] = TAGS) -> LogPage:
    """`vs samples`: Megatron has curves whose steps are samples."""
    points = [Scalar(tag, 1.0, iteration * 8 if tag.endswith("samples") else iteration) for tag in tags]
    return LogPage(3, call, iteration, 1.0, tuple(points), texts=(Text("arguments", "lr 1", iteration),))


def own(iteration: int) -> OwnPage:
    return OwnPage(3, 0, iteration, 1.0, (Scalar("resihp/workers_alive", 4.0, iteration),))


class Job:
    """Coordinators that write one after the other, each of which is lost; they all do so in one second."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self._monkeypatch, self._second = directory, monkeypatch, 1000

    def lead(self, *pages: LogPage, run: str = "a run") -> Any:
        """Write, and don't close."""
        self._second += 1
        with self._monkeypatch.context() as patched:
            patched.setattr("tensorboard.summary.writer.event_file_writer.time.time", lambda: self._second)
            files = TensorBoardFiles(TensorBoardWish(str(self.directory), 10), Term(run))
        for each in pages:
            files.write(each)
        return files

    def steps(self) -> dict[str, list[int]]:
        """Of all curves and texts, as TensorBoard reads them."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(self.directory), size_guidance={"scalars": 0, "tensors": 0})
        found.Reload()
        curves = {tag: [point.step for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
        return curves | {tag: [each.step for each in found.Tensors(tag)] for tag in found.Tags()["tensors"]}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def of(*iterations: int) -> dict[str, list[int]]:
    steps = list(iterations)
    return {"lm loss": steps, "grad-norm": steps, "lm loss vs samples": [8 * each for each in steps],
            "arguments/text_summary": steps}  # fmt: skip


def test_pages_that_are_sent_again_are_written_once(job: Job) -> None:
    job.lead(page(1), page(2))
    job.lead(page(1), page(2), page(3))
    job.lead(page(1), page(2), page(3), page(4))
    assert job.steps() == of(1, 2, 3, 4)


@pytest.mark.parametrize("tags", [TAGS[:1], TAGS[:2], TAGS])
def test_a_page_in_the_middle_of_which_one_is_lost_is_completed(job: Job, tags: Sequence[str]) -> None:
    first = job.lead(page(1))
    for point in page(2, tags=tags).scalars:
        first._writer.add_scalar(point.tag, point.value, point.step)
    first._writer.flush()
    job.lead(page(1), page(2), page(3))
    job.lead(page(2), page(3))
    assert job.steps() == of(1, 2, 3)


def test_a_file_that_ends_in_the_middle_of_a_point_is_gone_on_with(job: Job) -> None:
    job.lead(page(1), page(2))
    [file] = job.directory.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    job.lead(page(1), page(2), page(3))
    assert job.steps() == of(1, 2, 3)


def test_evaluations_at_the_last_step_are_all_there(job: Job) -> None:
    """Megatron logs those after training at the step of the one before."""
    calls = [page(6, call, tags=["validation"]) for call in range(3)]
    job.lead(*calls[:2])
    job.lead(*calls)
    assert job.steps()["validation"] == [6, 6, 6]


def test_the_plugin_s_own_points_are_written_once_beside(job: Job) -> None:
    """They come before or after the page of their iteration, and may come to both coordinators."""
    job.lead(page(1), own(1), own(2), page(2))
    job.lead(own(2), page(1), page(2), page(3), own(3))
    assert job.steps() == of(1, 2, 3) | {"resihp/workers_alive": [1, 2, 3]}


def test_another_job_in_the_same_directory_logs_its_own_steps(job: Job) -> None:
    """It has been started again from an earlier checkpoint."""
    job.lead(page(1), page(2))
    job.lead(page(2), run="another run")
    assert job.steps()["lm loss"] == [1, 2, 2]
