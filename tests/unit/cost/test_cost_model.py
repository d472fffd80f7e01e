# SPDX-License-Identifier: Apache-2.0
"""The cost model of a job: fitted from warm-up, kept current without learning a fault, saved and loaded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_resihp.cost.fitted.current import CurrentCost
from megatron_resihp.cost.fitted.model import CostModel, fit_links, fit_ops, term
from megatron_resihp.cost.fitted.store import CostModelError, load, save

STAGE = np.array([0, 0, 1, 1])
OWN = np.array([[1e-6, 2e-6], [2e-6, 4e-6]])  # αs, [stages, kinds]
BETA, COLLECTIVE = 1e-10, 3e-3


def warm_up(iterations: int = 30, noise: float = 0.01, seed: int = 0) -> dict[str, Any]:
    """4 workers in 2 stages; kinds F and B; one chunk; 8 micro-batches; waits timed in one of four."""
    random = np.random.default_rng(seed)
    tokens = random.uniform(1e3, 8e3, (iterations, 4, 8))
    squares = random.uniform(1e6, 3e7, (iterations, 4, 8))
    own = OWN[STAGE][None, :, :, None, None] * tokens[:, :, None, None] + BETA * squares[:, :, None, None]
    own = own * (1 + noise * random.standard_normal(own.shape))
    waited = np.full(own.shape, np.nan)
    waited[..., ::4] = COLLECTIVE
    return {"compute": own + COLLECTIVE, "waited": waited, "tokens": tokens, "squares": squares}


def model(**changes: Any) -> CostModel:
    ops, collectives = fit_ops(STAGE, **warm_up(**changes))
    return CostModel(ops, collectives, {}, {"optimizer": 0.01})


def test_own_compute_and_collectives_are_told_apart() -> None:
    fitted = model()
    tokens, squares = np.full((4, 1), 5e3), np.full((4, 1), 1e7)
    expected = OWN[STAGE] * 5e3 + BETA * 1e7
    own = fitted.own_compute(STAGE, tokens, squares)
    assert own.shape == (4, 2, 1, 1)
    assert own[:, :, 0, 0] == pytest.approx(expected, rel=0.01)
    assert fitted.durations(STAGE, tokens, squares)[:, :, 0, 0] == pytest.approx(expected + COLLECTIVE, rel=0.01)


def test_without_timed_waits_the_whole_duration_counts() -> None:
    data = warm_up()
    data["waited"][:] = np.nan
    ops, collectives = fit_ops(STAGE, **data)
    assert (collectives.gamma == 0).all() and (collectives.alpha == 0).all()
    assert ops.gamma == pytest.approx(COLLECTIVE, rel=0.1)


def test_stages_may_have_unlike_numbers_of_workers() -> None:
    data = warm_up()
    ops, _ = fit_ops(np.array([0, 1, 1, 1]), **data)
    assert ops.alpha.shape == (2, 2, 1)
    assert np.isfinite(ops.alpha).all()


def test_a_link_has_latency_and_bandwidth() -> None:
    sizes = np.tile(np.array([1e6, 2e6, 8e6]), (10, 2, 3))
    seconds = 1e-4 + sizes / np.array([1e10, 5e9])[:, None]
    links = fit_links(np.array([[0, 2], [3, 1]]), seconds, sizes)
    assert links[1, 3].seconds_per_byte == pytest.approx(2e-10)
    assert links[0, 2].latency == pytest.approx(1e-4)
    assert links[0, 2].informative


def test_transfers_of_one_size_give_a_level() -> None:
    links = fit_links(np.array([[0, 1]]), np.full((10, 1, 4), 2e-3), np.full((10, 1, 4), 1e6))
    assert not links[0, 1].informative
    assert links[0, 1].seconds(1e6) == pytest.approx(2e-3)


def test_a_job_without_links_has_no_link_costs() -> None:
    assert fit_links(np.zeros((0, 2), np.int64), np.zeros((5, 0, 0)), np.zeros((5, 0, 0))) == {}
    assert fit_links(np.array([[0, 1]]), np.zeros((5, 1, 0)), np.zeros((5, 1, 0))) == {}


def test_who_came_first_to_a_collective_does_not_make_it_longer() -> None:
    seconds = np.full((20, 4), 0.5)
    seconds[:, 2] = 0.01
    assert term(seconds) == pytest.approx(0.01)
    assert term(np.full((20, 4), np.nan)) == 0.0


def follow(current: CurrentCost, factor: np.ndarray, suspect: np.ndarray, iterations: int = 300) -> np.ndarray:
    """Feed iterations in which each worker takes `factor` times as long; returns the final α of kind F per stage."""
    data = warm_up(iterations, seed=1)
    for number in range(iterations):
        compute = data["compute"][number] * factor[:, None, None, None]
        waited = data["waited"][number] * factor[:, None, None, None]
        current.update(STAGE, compute, waited, data["tokens"][number], data["squares"][number], suspect)
    return current.model.ops.alpha[:, 0, 0]


NOBODY = np.zeros(4, dtype=bool)


def test_slow_change_is_followed() -> None:
    current = CurrentCost(model(), memory=50)
    before = current.model.ops.alpha[:, 0, 0].copy()
    follow(current, np.full(4, 1.01), NOBODY)
    assert follow(current, np.full(4, 1.02), NOBODY) / before == pytest.approx(1.02, abs=0.004)


def test_memory_is_in_iterations_however_often_there_are_updates() -> None:
    data, found = warm_up(141, noise=0.001, seed=1), []
    for every in (1, 7):
        current = CurrentCost(model(iterations=150), memory=100)
        for number in range(0, 141, every):
            measured = (1.01 * data[name][number] for name in ("compute", "waited"))
            features = (data[name][number] for name in ("tokens", "squares"))
            current.update(STAGE, *measured, *features, NOBODY, iterations=every)
        found.append(current.model.own_compute(STAGE, np.full((4, 1), 5e3), np.full((4, 1), 1e7)))
    assert found[1] == pytest.approx(found[0], rel=0.001)


def test_a_suspect_teaches_nothing() -> None:
    current = CurrentCost(model(), memory=50)
    before = current.model.ops.alpha[:, 0, 0].copy()
    after = follow(current, np.array([1.0, 1.02, 1.0, 1.0]), np.array([False, True, False, False]))
    assert after / before == pytest.approx(1.0, abs=0.003)


def test_a_fault_that_nobody_has_named_is_not_learned() -> None:
    current = CurrentCost(model(), memory=50)
    before = current.model.ops.alpha[:, 0, 0].copy()
    assert follow(current, np.array([1.0, 1.3, 1.0, 1.0]), NOBODY) / before == pytest.approx(1.0, abs=0.005)


def test_noise_of_one_iteration_is_not_learned_as_the_cost_of_its_documents() -> None:
    """All workers are 6 % slower for a moment, just when documents become long."""
    current = CurrentCost(model(noise=0.02))
    rng = np.random.default_rng(0)
    tokens, squares = np.full((4, 8), 6e3), rng.uniform(1.5e8, 2e8, (4, 8))
    usual = (OWN[STAGE][:, :, None] * tokens[:, None] + BETA * squares[:, None])[:, :, None]
    current.update(STAGE, 1.06 * usual, np.full_like(usual, np.nan), tokens, squares, NOBODY, iterations=7)
    assert current.model.own_compute(STAGE, tokens, squares) == pytest.approx(usual, rel=0.025)


def test_without_measurements_nothing_is_forgotten() -> None:
    current = CurrentCost(model())
    before = current.model.ops.alpha.copy()
    nothing = np.full((4, 2, 1, 8), np.nan)
    for _ in range(1000):
        current.update(STAGE, nothing, nothing, np.full((4, 8), np.nan), np.full((4, 8), np.nan), NOBODY)
    assert current.model.ops.alpha == pytest.approx(before)


def test_what_was_alike_in_warm_up_is_learned_when_it_varies() -> None:
    data = warm_up()
    alike = {**data, "tokens": np.full((30, 4, 8), 4e3), "squares": np.full((30, 4, 8), 1e7)}
    alike["compute"] = OWN[STAGE][None, :, :, None, None] * 4e3 + BETA * 1e7 + np.zeros_like(data["compute"])
    alike["waited"] = np.full_like(data["waited"], np.nan)
    start = CostModel(*fit_ops(STAGE, **alike))
    assert not start.informative.any()
    current = CurrentCost(start)
    random = np.random.default_rng(0)
    for spread in np.linspace(0.0005, 0.2, 60):  # as documents drift apart, so that each step is believable
        tokens = 4e3 * (1 + spread * random.uniform(-0.01, 0.01, (4, 8)))
        squares = 1e7 * (1 + spread * random.uniform(-1, 1, (4, 8)))
        compute = (OWN[STAGE][:, :, None] * tokens[:, None] + BETA * squares[:, None])[:, :, None]
        current.update(STAGE, compute, np.full_like(compute, np.nan), tokens, squares, NOBODY)
    assert current.model.informative.any()


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    saved = model()
    save(saved, tmp_path / "cost.json")
    loaded = load(tmp_path / "cost.json")
    for name in ("alpha", "beta", "gamma", "informative", "finding", "noise", "samples", "information"):
        assert np.array_equal(getattr(loaded.ops, name), getattr(saved.ops, name), equal_nan=True)
    assert loaded.terms == saved.terms
    assert np.isnan(loaded.iteration_mape)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "version None"),
        ('{"version": 99}', "version 99, this is version 1"),
        ('{"version": 1}', "not a complete cost model"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(CostModelError, match=says) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match="cannot be read"):
        load(tmp_path / "none.json")
