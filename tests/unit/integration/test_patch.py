# SPDX-License-Identifier: Apache-2.0
"""Patches: all of them or none, an error that says what was expected, and the way back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from megatron_resihp.integration.patch import Patch, PatchError, apply_all, undo_all

MODULE = "resihp_patch_target"


class Model:
    def forward(self, tokens: str, mask: str = "none") -> str:
        return f"{tokens}/{mask}"


def train(model: Model, iterations: int, *, quiet: bool = False) -> str:
    return f"train {iterations}"


@pytest.fixture(autouse=True)
def target() -> Iterator[Any]:
    """A module that stands for one of Megatron's."""
    module: Any = ModuleType(MODULE)
    module.train = train
    module.Model = type("Model", (), {"forward": Model.forward})
    module.LIMIT = 3
    sys.modules[MODULE] = module
    yield module
    del sys.modules[MODULE]


def louder(original: Callable[..., str]) -> Callable[..., str]:
    return lambda *args, **kwargs: original(*args, **kwargs) + "!"


def patch(attribute: str, parameters: tuple[str, ...] | None, replacement: Callable[[Any], Any] = louder) -> Patch:
    return Patch(f"{MODULE}:{attribute}", replacement, parameters, "for the test")


def test_functions_methods_and_values_are_replaced(target: Any) -> None:
    apply_all([
        patch("train", ("model", "iterations")),
        patch("Model.forward", ("self", "tokens")),
        patch("LIMIT", None, lambda original: original + 1),
    ])  # fmt: skip
    assert target.train(None, 2) == "train 2!"
    assert target.Model().forward("x") == "x/none!"
    assert target.LIMIT == 4


def test_undoing_restores_the_originals(target: Any) -> None:
    forward = target.Model.forward
    patches = [patch("train", ("model",)), patch("Model.forward", ("self",)), patch("train", None)]
    apply_all(patches)
    assert target.train(None, 2) == "train 2!!"
    undo_all(patches)
    assert target.train is train and target.Model.forward is forward


def test_another_signature_names_target_found_and_expected() -> None:
    with pytest.raises(PatchError) as caught:
        patch("train", ("model", "optimizer")).check()
    assert str(caught.value) == f"{MODULE}:train takes (model, iterations, quiet), expected (model, optimizer, ...)"


def test_parameters_that_came_later_do_no_harm() -> None:
    patch("train", ("model", "iterations")).check()


def test_parameters_in_another_order_do() -> None:
    with pytest.raises(PatchError, match="expected"):
        patch("train", ("iterations", "model")).check()


@pytest.mark.parametrize("name", [f"{MODULE}:gone", f"{MODULE}:Model.gone", f"{MODULE}:Gone.forward", "no.such:thing"])
def test_a_target_that_is_gone_is_named(name: str) -> None:
    with pytest.raises(PatchError, match=f"{name} does not exist"):
        Patch(name, louder, None, "for the test").check()


@pytest.mark.parametrize("bad", [("train", ("other",)), ("gone", None)])
def test_one_mismatch_and_nothing_is_patched(target: Any, bad: tuple[str, Any]) -> None:
    forward = target.Model.forward
    with pytest.raises(PatchError):
        apply_all([patch("Model.forward", ("self",)), patch("train", ("model",)), patch(*bad)])
    assert target.train is train and target.Model.forward is forward


def test_a_replacement_that_fails_takes_the_others_back(target: Any) -> None:
    def broken(original: Any) -> Any:
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        apply_all([patch("train", ("model",)), patch("LIMIT", None, broken)])
    assert target.train is train and target.LIMIT == 3
