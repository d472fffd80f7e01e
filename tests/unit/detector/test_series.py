# SPDX-License-Identifier: Apache-2.0
"""Series of iteration times without workers: slow-downs and recoveries are found, and nothing else is."""

import numpy as np
import pytest

from megatron_resihp.detector.input.replay import Replay
from megatron_resihp.detector.input.table import Table
from megatron_resihp.detector.series.judge import judge_series
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.verdict import Change

RATE = 0.01


def times(rows: int, noise: float = 0.02, seed: int = 0) -> np.ndarray:
    return 2.0 * (1 + noise * np.random.default_rng(seed).standard_normal(rows))


def judged(seconds: np.ndarray, tokens: np.ndarray | None = None, restarts: tuple[int, ...] = ()) -> Replay:
    rows = np.arange(1, seconds.size + 1)
    segments = np.searchsorted(restarts, rows, side="right")
    unknown = np.full((seconds.size, 1), np.nan)
    known = unknown if tokens is None else tokens[:, None]
    table = Table(np.zeros(1, np.int64), rows, segments, rows, seconds[:, None], known, unknown, False, ())
    return judge_series(table, RATE, Settings())


def changes(result: Replay) -> list[tuple[Change, int]]:
    return [(verdict.change, verdict.iteration) for verdict in result.verdicts]


@pytest.mark.parametrize(("noise", "factor", "latency"), [(0.01, 1.15, 4), (0.03, 1.3, 4), (0.08, 1.3, 12)])
def test_a_slow_spell_within_the_first_rows_is_found_and_its_end_too(noise: float, factor: float, latency: int) -> None:
    seconds = times(200, noise)
    seconds[14:60] *= factor
    (onset, began), (recovery, ended) = changes(judged(seconds))
    assert (onset, recovery) == (Change.ONSET, Change.RECOVERY)
    assert 15 <= began <= 14 + latency
    assert 61 <= ended <= 60 + latency


def test_a_job_that_became_faster_is_held_to_its_new_speed() -> None:
    seconds = times(300, 0.03)
    seconds[100:] *= 0.8
    seconds[160:260] *= 1.25
    result = judged(seconds)
    assert [change for change, _ in changes(result)] == [Change.ONSET, Change.RECOVERY]
    assert 161 <= result.verdicts[0].iteration <= 166
    assert result.verdicts[0].speed == pytest.approx(0.8, abs=0.04)


def test_a_slow_start_is_not_the_healthy_level() -> None:
    seconds = times(200, 0.02)
    seconds[:30] *= 1.3
    seconds[150:] *= 1.2
    ((change, at),) = changes(judged(seconds))
    assert change is Change.ONSET
    assert 151 <= at <= 156


@pytest.mark.parametrize("seed", range(3))
def test_noise_spikes_and_evaluations_are_no_slowdown(seed: int) -> None:
    seconds = times(600, 0.08, seed)
    seconds[24::25] *= 2.5
    seconds[np.random.default_rng(seed).integers(0, 600, 10)] *= 3
    assert changes(judged(seconds)) == []


def wandering(seed: int) -> np.ndarray:
    """Times with noise of 8 % whose autocorrelation is 0.7."""
    noise = np.random.default_rng(seed).standard_normal(400)
    for row in range(1, noise.size):
        noise[row] = 0.7 * noise[row - 1] + 0.51**0.5 * noise[row]
    return 2.0 * (1 + 0.08 * noise)


@pytest.mark.parametrize("seed", [7, 8, 19, 50])
def test_noise_that_wanders_and_comes_back_is_no_slowdown(seed: int) -> None:
    assert changes(judged(wandering(seed))) == []


def test_noise_that_was_taken_for_a_slowdown_once_is_not_again() -> None:
    found = [change for change, _ in changes(judged(wandering(30)))]
    assert found in ([], [Change.ONSET, Change.RECOVERY])


@pytest.mark.parametrize("seed", range(3))
def test_a_slowdown_of_two_and_a_half_percent_shows_where_noise_is_one_percent(seed: int) -> None:
    seconds = times(400, 0.01, seed)
    seconds[199:280] *= 1.025
    (onset, began), (recovery, ended) = changes(judged(seconds))
    assert (onset, recovery) == (Change.ONSET, Change.RECOVERY)
    assert 200 <= began < 230
    assert 281 <= ended < 311


def test_what_was_faster_for_a_few_rows_only_hides_no_slowdown() -> None:
    seconds = times(200, 0.02)
    seconds[100:108] *= 0.8
    assert changes(judged(seconds)) == []
    seconds[108:] *= 1.3
    ((change, at),) = changes(judged(seconds))
    assert change is Change.ONSET
    assert 109 <= at <= 114


def test_a_slow_drift_of_two_percent_is_no_slowdown() -> None:
    seconds = times(900, 0.01) * (1 + 0.02 * np.sin(np.arange(900) / 50))
    assert changes(judged(seconds)) == []


def test_a_level_that_creeps_up_is_a_slowdown() -> None:
    seconds = times(900, 0.01) * (1 + 0.2 * np.clip(np.arange(900) / 800 - 0.2, 0, 1))
    assert changes(judged(seconds))[0][0] is Change.ONSET


def test_a_batch_that_ramps_up_is_healthy_and_a_new_size_unknown_at_first() -> None:
    tokens = 8192.0 * np.repeat([1, 2, 4], 60)
    seconds = times(180) * tokens / 8192
    result = judged(seconds, tokens)
    assert changes(result) == []
    assert 0 < result.unknown < 60


def test_a_slowdown_under_a_changing_workload_is_found() -> None:
    tokens = np.random.default_rng(1).uniform(4096, 16384, 300)
    seconds = times(300) * (0.2 + 0.8 * tokens / 8192)
    seconds[200:] *= 1.15
    ((change, at),) = changes(judged(seconds, tokens))
    assert change is Change.ONSET
    assert 201 <= at <= 206


def test_a_restart_at_another_speed_is_no_slowdown_and_ends_none_by_itself() -> None:
    seconds = times(300)
    seconds[150:] *= 1.3
    assert changes(judged(seconds, restarts=(151,))) == []
    seconds = times(300)
    seconds[100:150] *= 1.3
    seconds[150:200] *= 1.3
    found = changes(judged(seconds, restarts=(151,)))
    assert [change for change, _ in found] == [Change.ONSET, Change.RECOVERY]
    assert 201 <= found[1][1] <= 206


def test_hardly_any_evidence_is_said_to_be_so() -> None:
    result = judged(2.0 * np.exp(0.5 * np.random.default_rng(0).standard_normal(40)))
    assert result.verdicts == []
    assert result.smallest_seen > 0.3
    assert result.iteration_mape > 0.2
