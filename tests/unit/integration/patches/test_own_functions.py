# SPDX-License-Identifier: Apache-2.0
"""What a script's own configuration may not hold."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from megatron_resihp.integration.patches.own_functions import FUNCTIONS, unheeded


def test_what_megatron_makes_itself_is_heeded() -> None:
    model = SimpleNamespace(**dict.fromkeys(FUNCTIONS))
    assert unheeded(model, [SimpleNamespace(grad_norm_skip_threshold=math.inf), SimpleNamespace()]) == []
    assert unheeded(SimpleNamespace(), []) == [], "older releases have none of them"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_no_plan_would_call_is_named(name: str) -> None:
    [line] = unheeded(SimpleNamespace(**{name: print}), [])
    assert f"sets {name}, which is not supported with --resihp: {FUNCTIONS[name]}; leave it out" in line


def test_a_norm_above_which_steps_are_skipped_is_named() -> None:
    optimizers = [SimpleNamespace(grad_norm_skip_threshold=each) for each in (math.inf, 5.0)]
    [line] = unheeded(SimpleNamespace(), optimizers)
    assert "sets grad_norm_skip_threshold" in line
