# SPDX-License-Identifier: Apache-2.0
"""A resumed job: judged after a few iterations, by what an earlier run has learned and a file has kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_resihp.cost.fitted.store import CostModelError
from megatron_resihp.detector.judging.learned import Learned, load, save
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.verdict import Change, Kind, Verdict
from megatron_resihp.lab.detection.jobs import JobSpec, Schedule, SyntheticJob, make_job
from megatron_resihp.lab.detection.noise import NOISES
from megatron_resihp.lab.detection.shapes import SHAPES, Shape

SETTINGS = Settings(warm_up=30)
JUDGED = SETTINGS.skipped + SETTINGS.settling
"""Iterations of a resumed job that are not judged."""
ONSET = JUDGED + 5


@pytest.fixture
def known(small_job: Any) -> Learned:
    """What a first run has learned."""
    job = small_job(seed=1)
    monitor = Monitor(job.layout, 0.01, 1000, SETTINGS)
    for each in job.iterations(80):
        monitor.observe(each)
    learned = monitor.learned()
    assert learned is not None
    return learned


def resume(job: Any, known: Learned, last: int) -> tuple[Monitor, list[Verdict]]:
    monitor = Monitor(job.layout, 0.01, 1000, SETTINGS, known)
    return monitor, [verdict for each in job.iterations(last) for verdict in monitor.observe(each)]


def test_a_resumed_job_is_judged_after_settling(small_job: Any, known: Learned) -> None:
    job = small_job()
    monitor = Monitor(job.layout, 0.01, 1000, SETTINGS, known)
    watched = []
    for each in job.iterations(JUDGED + 1):
        watched.append(monitor.watching)
        monitor.observe(each)
    assert watched == [False] * JUDGED + [True] and monitor.resumed


@pytest.mark.parametrize("speed", [0.93, 0.8, 0.4])
def test_a_slow_worker_is_named_soon(small_job: Any, slow_from: Any, known: Learned, speed: float) -> None:
    monitor, verdicts = resume(small_job({5: slow_from(ONSET, speed)}), known, ONSET + 30)
    assert [(each.kind, each.change, each.workers) for each in verdicts] == [(Kind.COMPUTE, Change.ONSET, (5,))]
    assert verdicts[0].iteration <= ONSET + 7 and abs(monitor.speed(5) - speed) < 0.02


def test_a_slow_link_is_named_soon(small_job: Any, slow_from: Any, known: Learned) -> None:
    _, verdicts = resume(small_job({(2, 6): slow_from(ONSET, 0.5)}), known, ONSET + 20)
    assert [(each.kind, each.workers) for each in verdicts] == [(Kind.LINK, (2, 6))]
    assert verdicts[0].iteration <= ONSET + 5


def test_who_is_slow_from_the_start_is_told_by_its_peers(small_job: Any, slow_from: Any, known: Learned) -> None:
    _, verdicts = resume(small_job({6: slow_from(1, 0.7)}), known, 40)
    assert [(each.change, each.workers, each.iteration) for each in verdicts] == [(Change.ONSET, (6,), JUDGED)]


def test_other_devices_of_other_speed_are_no_verdict(small_job: Any, slow_from: Any, known: Learned) -> None:
    monitor, verdicts = resume(
        small_job({worker: slow_from(1, 0.8 + 0.02 * worker) for worker in range(8)}), known, 100
    )
    assert verdicts == [] and monitor.resumed


def test_costs_of_another_model_are_not_used(small_job: Any, slow_from: Any, known: Learned) -> None:
    without_attention = replace(known.model.ops, alpha=3e-6 * np.ones((2, 3, 1)), beta=np.zeros((2, 3, 1)))
    other = replace(known, model=replace(known.model, ops=without_attention))
    monitor, verdicts = resume(small_job({5: slow_from(60, 0.8)}), other, SETTINGS.skipped + SETTINGS.warm_up - 1)
    assert not monitor.resumed and not monitor.watching
    job = small_job({5: slow_from(60, 0.8)})
    verdicts += [verdict for each in job.iterations(80, 32) for verdict in monitor.observe(each)]
    assert [each.workers for each in verdicts] == [(5,)]


def test_what_was_saved_gives_the_same_verdicts(small_job: Any, slow_from: Any, known: Learned, tmp_path: Path) -> None:
    save(known, tmp_path / "cost_model.json")
    job = small_job({5: slow_from(ONSET, 0.9), (0, 4): slow_from(ONSET, 0.6)})
    verdicts = resume(job, known, 60)[1]
    assert len(verdicts) == 2 and resume(job, load(tmp_path / "cost_model.json"), 60)[1] == verdicts


def test_transients_of_the_earlier_run_still_do_not_alarm(small_job: Any, slow_from: Any, known: Learned) -> None:
    """Three slow iterations are a slowdown to who has never seen that they pass."""
    job = small_job({3: slow_from(ONSET, 0.5, ONSET + 3)})
    assert resume(job, known, ONSET + 20)[1]
    noise = replace(known.workers.noise, transient=4)
    experienced = replace(known, workers=replace(known.workers, noise=noise))
    assert not resume(job, experienced, ONSET + 20)[1]


@pytest.fixture(scope="module")
def learned_at_scale() -> Learned:
    """From a job of the benchmark's kind, 16 workers with the noise that a node shares."""
    job = synthetic(SHAPES[0], seed=1)
    monitor = Monitor(job.layout, 0.01, 300)
    for each in job.observations():
        monitor.observe(each)
    learned = monitor.learned()
    assert learned is not None
    return learned


def synthetic(shape: Shape, seed: int) -> SyntheticJob:
    noise = next(each for each in NOISES if each.name == "node")
    spec = JobSpec(shape, 8192, 4, Schedule.ONE_F_ONE_B, noise, iterations=100)
    return make_job(spec, (), np.random.default_rng(seed))


@pytest.mark.parametrize("degrees", [(4, 2, 2), (4, 1, 4), (2, 4, 2), (4, 4, 2)])
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_healthy_jobs_of_any_layout_give_no_verdict(
    learned_at_scale: Learned, degrees: tuple[int, int, int], seed: int
) -> None:
    """Degrees: tensor, data, pipeline."""
    job = synthetic(Shape("7b", *degrees, layers=32, hidden=4096), seed)
    monitor = Monitor(job.layout, 0.01, 300, known=learned_at_scale)
    verdicts = [verdict for each in job.observations() for verdict in monitor.observe(each)]
    assert verdicts == [] and monitor.watching


def spoiled(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_text(path.read_text()[:500]), "is not JSON"),
        (lambda path: spoiled(path, version=99), "version 99"),
        (lambda path: spoiled(path, noise=None), "noise"),
        (lambda path: spoiled(path, noise={"workers": {"members": [[0]]}}), "noise"),
        (lambda path: spoiled(path, ops={}), "not a complete cost model"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
)
def test_a_bad_file_is_one_clear_line(known: Learned, tmp_path: Path, spoil: Callable[[Path], None], says: str) -> None:
    path = tmp_path / "cost_model.json"
    save(known, path)
    spoil(path)
    with pytest.raises(CostModelError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_noise_that_does_not_fit_its_units_is_refused(known: Learned, tmp_path: Path) -> None:
    path = tmp_path / "cost_model.json"
    save(known, path)
    noise = json.loads(path.read_text())["noise"]
    noise["workers"]["members"].pop()
    spoiled(path, noise=noise)
    with pytest.raises(CostModelError, match="7 units"):
        load(path)
