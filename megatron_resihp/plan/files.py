# SPDX-License-Identifier: Apache-2.0
"""Reads plans from files. May import `coding` and this package's `errors`.

It does not check their contents; `ParallelPlan.from_dict` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_resihp.coding import FILE, WrongValueError, decode
from megatron_resihp.plan.errors import PlanError


@dataclass(frozen=True)
class _Found:
    """The fields of a file for one strategy.

    Attributes:
        plan: the plan's JSON; None if there is none.
        no_plan: the reason why there is none.
    """

    plan: Any = None
    no_plan: str | None = None


@dataclass(frozen=True)
class _File(_Found):
    """The fields of a file, which may also hold several strategies by name."""

    strategies: dict[str, _Found] = field(default_factory=dict)


def read_plan(path: Path, strategy: str | None = None) -> Any:
    """The plan's JSON in a file: a plan, an object with a "plan", or what `resihp plan --json` prints.

    Args:
        strategy: the strategy whose plan to read, if the file has several.

        Raises:
            PlanError: the file has no plan, or it is unclear which one is meant.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"{path} can't be read: {error.strerror}") from None
    except ValueError:
        raise PlanError(f"{path} is not JSON; give a plan, or what `resihp plan --json` prints") from None
    if not isinstance(data, dict):
        raise PlanError(f"{path} holds no plan")
    if "replicas" in data:
        return data
    try:
        file: _File = decode(_File, data, FILE)
    except WrongValueError as error:
        raise PlanError(f"{path} holds no plan: {error}") from None
    found = _of_strategy(file.strategies, strategy, path) if file.strategies else file
    if found.plan is None:
        raise PlanError(f"{path} holds no plan{'' if found.no_plan is None else f': {found.no_plan}'}")
    return found.plan


def _of_strategy(answers: Mapping[str, _Found], strategy: str | None, path: Path) -> _Found:
    names = ", ".join(answers)
    if strategy is None and len(answers) != 1:
        mend = "choose with --strategy of `resihp plan` or `resihp apply`"
        raise PlanError(f"{path} has plans of several strategies; {mend}: {names}")
    name = strategy or next(iter(answers))
    if name not in answers:
        raise PlanError(f"{path} has no plan of strategy {name}; it has {names}")
    return answers[name]
