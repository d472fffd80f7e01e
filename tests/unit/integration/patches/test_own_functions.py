# SPDX-License-Identifier: Apache-2.0
"""What a script's own configuration may not hold."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from megatron_resihp.integration.patches.arguments.own_functions import FUNCTIONS, unheeded


def test_what_megatron_makes_itself_is_heeded() -> None:
    model = SimpleNamespace(**dict.fromkeys(FUNCTIONS))
    trained = {"weight": SimpleNamespace(requires_grad=True)}
    optimizers = [SimpleNamespace(grad_norm_skip_threshold=math.inf), SimpleNamespace()]
    assert unheeded(model, optimizers, False, trained) == []
    assert unheeded(SimpleNamespace(), [], False, {}) == [], "older releases have none of them"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_no_plan_would_call_is_named(name: str) -> None:
    [line] = unheeded(SimpleNamespace(**{name: print}), [], False, {})
    assert f"sets {name}, which is not supported with --resihp: {FUNCTIONS[name]}; leave it out" in line


def test_a_norm_above_which_steps_are_skipped_is_named() -> None:
    optimizers = [SimpleNamespace(grad_norm_skip_threshold=each) for each in (math.inf, 5.0)]
    [line] = unheeded(SimpleNamespace(), optimizers, False, {})
    assert "sets grad_norm_skip_threshold" in line


@pytest.mark.parametrize(("by_script", "by_flag"), [(True, False), (False, True)])
def test_losses_per_token_are_wanted_by_the_flag_too(by_script: bool, by_flag: bool) -> None:
    model = SimpleNamespace(calculate_per_token_loss=by_script)
    [line] = unheeded(model, [], by_flag, {})
    assert "give --calculate-per-token-loss" in line
    assert unheeded(model, [], by_script, {}) == []


def test_parameters_that_are_not_trained_are_named() -> None:
    """A worker that comes later would have other ones."""
    parameters = {name: SimpleNamespace(requires_grad=name == "head") for name in ("embedding", "head", "layer")}
    [line] = unheeded(SimpleNamespace(), [], False, parameters)
    assert "freezes embedding and 1 more, which is not supported" in line
