"""When to act on a slow worker."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.detector.ski_rental import SkiRental


def endured(cost, seconds, healthy, iterations):
    rule = SkiRental(cost)
    for iteration in range(iterations):
        if rule.due:
            return iteration
        rule = rule.after(seconds, healthy)
    return None


def test_a_worse_slowness_is_acted_upon_sooner():
    assert endured(10.0, 1.25, 1.0, 100) == 40
    assert endured(10.0, 3.0, 1.0, 100) == 5


def test_nothing_is_lost_by_fast_or_unknown_iterations():
    assert SkiRental(1.0).after(0.5, 1.0).after(float("nan"), 1.0).lost == 0.0


@given(st.floats(0.1, 100), st.floats(0.01, 5), st.integers(1, 3000))
def test_at_most_twice_the_best_decision_and_one_iteration(cost, excess, lasts):
    acted = endured(cost, 1 + excess, 1.0, lasts)
    paid = lasts * excess if acted is None else acted * excess + cost
    assert paid <= 2 * min(cost, lasts * excess) + excess + 1e-9 * cost
