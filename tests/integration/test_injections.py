# SPDX-License-Identifier: Apache-2.0
"""Slow workers and links asked for from outside while a job runs, and the emulated clock, on real processes."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Jobs, check_training, tiny
from launched import Launched, eventually

from megatron_resihp.cli import main
from megatron_resihp.control import exit_codes
from megatron_resihp.control.commands import contact
from megatron_resihp.cost.profile import BUILT_IN

Said = Callable[..., str]


@pytest.fixture
def injection(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs `resihp inject` and returns its one line, from standard output or, if it refused, from standard error."""

    def run(run_dir: Path, *arguments: str, refused: bool = False) -> str:
        code = main(["inject", *arguments, "--run-dir", str(run_dir)])
        output = capsys.readouterr()
        said, silent = (output.err, output.out) if refused else (output.out, output.err)
        assert (code, silent) == (2 if refused else 0, ""), output
        assert said.startswith("resihp: ") and said.count("\n") == 1
        return said

    return run


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class TestWithoutEmulation:
    """The agent stops and continues its workers; these compute nothing."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Iterator[Launched]:
        (tmp_path / "run").mkdir()
        run = Launched(tmp_path / "run")
        run.await_event("epoch_started", epoch=0)
        yield run
        run.kill()

    def test_a_worker_is_sliced_until_it_is_cleared(self, run: Launched, injection: Said) -> None:
        pid = run.worker_pid(1)
        assert injection(run.run_dir, "slow", "1", "0.2") == "resihp: worker 1 is at 0.2 of its speed\n"
        eventually("it is stopped", lambda: state(pid) == "T")
        eventually("it goes on", lambda: state(pid) != "T")
        assert all(state(run.worker_pid(other)) != "T" for other in (0, 2))
        assert injection(run.run_dir, "clear") == "resihp: all workers and links are at full speed\n"
        run.await_event("drill_set", workers=[])
        eventually("it stays on", lambda: [state(pid) for _ in range(10_000)].count("T") == 0)
        run.ask("finish")
        assert run.end() == 0
        assert [event["speeds"] for event in run.events("drill_set")] == [{"1": 0.2}, {}]
        assert not run.events("worker_dead")

    def test_death_while_sliced_is_recovered_from(self, run: Launched, injection: Said) -> None:
        pid = run.worker_pid(1)
        injection(run.run_dir, "slow", "1", "0.01")
        injection(run.run_dir, "slow", "2", "0.5")
        eventually("it is stopped", lambda: state(pid) == "T")
        os.kill(pid, signal.SIGKILL)
        run.await_event("epoch_started", epoch=1)
        assert "worker 1 is dead" in injection(run.run_dir, "slow", "1", "0.5", refused=True)
        run.ask("finish")
        assert run.end() == 0
        assert [event["dead"] for event in run.events("worker_dead")] == [1]

    def test_the_job_ends_while_a_worker_is_sliced(self, run: Launched, injection: Said) -> None:
        injection(run.run_dir, "slow", "0", "0.05")
        run.ask("finish")
        assert run.end() == 0
        assert "no job runs in" in injection(run.run_dir, "clear", refused=True)

    def test_what_cannot_be_is_refused_in_one_line(self, run: Launched, injection: Said, tmp_path: Path) -> None:
        assert "there is no worker 7; the job has 0 to 2" in injection(run.run_dir, "slow", "7", "0.5", refused=True)
        assert "1.5 is not a speed; give one from 0.01 to 1" in injection(run.run_dir, "slow", "1", "1.5", refused=True)
        assert "'fast' is not a number" in injection(run.run_dir, "slow", "1", "fast", refused=True)
        assert "only be slowed on the emulated clock" in injection(run.run_dir, "link", "0", "1", "0.5", refused=True)
        assert "not worker 1 with itself" in injection(run.run_dir, "link", "1", "1", "0.5", refused=True)
        assert "no job runs in" in injection(tmp_path, "clear", refused=True)
        assert not run.events("drill_set")

    def test_a_job_that_was_killed_is_not_taken_for_running(
        self, run: Launched, injection: Said, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(contact, "CONNECT_S", 0.5)
        run.kill()
        assert "no job runs in" in injection(run.run_dir, "clear", refused=True)


def test_training_goes_on_while_one_worker_is_sliced_and_another_dies(jobs: Jobs) -> None:
    layout: dict[str, Any] = {"pipeline_model_parallel_size": 2}
    injections = ["slow:1:0.2@2", "slow:2:0.5@2", "kill:2@4:backward"]
    job = jobs.run(tiny(**layout, resihp_inject=injections), workers=4)
    check_training(job, jobs.reference(tiny(**layout), workers=4))
    assert [event["speeds"] for event in job.events("drill_set")] == [{"1": 0.2}, {"1": 0.2, "2": 0.5}]
    assert [event["dead"] for event in job.events("worker_dead")] == [2]


class TestEmulation:
    LAYOUT = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "train_iters": 24}

    @pytest.fixture
    def profile(self, tmp_path: Path) -> str:
        """The H800's, with ops of 65 and 130 ms: longer than real ones, whatever else runs on this machine."""
        data = json.loads((BUILT_IN / "h800.json").read_text())
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(data | {"time_scale": 0.15}))
        return str(path)

    @pytest.mark.nightly
    def test_a_worker_slowed_from_outside_and_cleared(self, jobs: Jobs, injection: Said, profile: str) -> None:
        """Two replicas of one worker each: an iteration lasts as long as the slower one's ops."""
        job = jobs.start(tiny(**self.LAYOUT, resihp_emulate=profile), workers=2)
        job.await_event("iteration", iteration=6)
        injection(job.run_dir, "slow", "1", "0.5")
        job.await_event("iteration", iteration=12)
        injection(job.run_dir, "clear")
        job.wait()
        check_training(job, jobs.reference(tiny(**self.LAYOUT), workers=2))
        healthy, slow, cleared = iteration_times(job)
        assert slow == pytest.approx(2 * healthy, rel=0.25)
        assert cleared == pytest.approx(healthy, rel=0.15)
        assert {event["ops"] for event in job.events("emulation")} == {2 * 2 * self.LAYOUT["train_iters"]}

    def test_scheduled_injections_strike_once_whatever_else_befalls_the_job(self, jobs: Jobs, profile: str) -> None:
        injections = ["slow:1:0.7@3", "kill:2@3:backward", "link:0-1:0.5@4", "clear@5"]
        layout: dict[str, Any] = {"pipeline_model_parallel_size": 2, "train_iters": 6}
        job = jobs.run(tiny(**layout, resihp_emulate=profile, resihp_inject=injections), workers=4)
        check_training(job, jobs.reference(tiny(**layout), workers=4))
        assert [(event["workers"], event["iteration"]) for event in job.events("drill_set")] == [
            ([1], 3), ([0, 1], 4), ([], 5),
        ]  # fmt: skip
        assert len(job.summary.recoveries) == 1

    def test_a_profile_that_is_none(self, jobs: Jobs) -> None:
        job = jobs.run(tiny(resihp_emulate="nowhere.json"), workers=1)
        assert job.code == 2 and "device profile nowhere.json: No such file" in job.log(0)
        assert "Traceback" not in job.log(0)


def iteration_times(job: Job) -> list[float]:
    """Median duration of the iterations between the fault injections, in order; the first one is the warm-up's."""
    bounds = [0.0, *(event["time"] for event in job.events("drill_set")), float("inf")]
    found: list[list[float]] = [[] for _ in bounds[1:]]
    for event in job.events("iteration"):
        if event["duration_s"] is not None and event["iteration"] > 2:
            began = event["time"] - event["duration_s"]
            for index, (first, last) in enumerate(pairwise(bounds)):
                if first <= began and event["time"] <= last:
                    found[index].append(event["duration_s"])
    return [statistics.median(times) for times in found]


ON_S, OFF_S = 0.02, 0.03
STOPPED_S = 20.0


@pytest.mark.nightly
def test_a_worker_that_somebody_stops_and_continues_in_turns_is_told_as_slow(jobs: Jobs) -> None:
    """And nobody as held up by data, though what it does for its data takes longer as well."""
    job = jobs.start(tiny(train_iters=20000), workers=2)
    job.await_event("iteration", timeout_s=300.0, iteration=100)
    held_up = job.output().count("data held up")
    victim, since = job.worker_pids()[1], time.monotonic()
    while time.monotonic() < since + STOPPED_S:
        os.kill(victim, signal.SIGSTOP)
        time.sleep(OFF_S)
        os.kill(victim, signal.SIGCONT)
        time.sleep(ON_S)
    found = job.await_event("verdict", timeout_s=20.0, change="onset")
    job.signal(signal.SIGTERM)
    assert job.wait(180.0).code == exit_codes.stopped_by(signal.SIGTERM)
    verdicts = [(event["iteration"], event["kind"], event["change"], event["workers"], event["speed"])
                for event in job.events("verdict")]  # fmt: skip
    print(verdicts, job.events("detection")[-1])
    assert (found["kind"], found["workers"]) == ("compute", [1]) and found["speed"] < 0.7, verdicts
    assert job.output().count("data held up") == held_up
