# SPDX-License-Identifier: Apache-2.0
"""Plans in files. Imports only the standard library and this package.

What they hold is not looked at; `ParallelPlan.from_dict` does that.
"""

import json
from pathlib import Path
from typing import Any

from megatron_resihp.plan.errors import PlanError


def read_plan(path: Path, strategy: str | None = None) -> Any:
    """The plan's JSON in a file: a plan, an object with a "plan", or what `resihp plan --json` prints.

    Args:
        strategy: whose plan, where the file has those of several.

    Raises:
        PlanError: there is none, or it isn't clear which.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"{path} can't be read: {error.strerror}") from None
    except ValueError:
        raise PlanError(f"{path} is no JSON; give a plan, or what `resihp plan --json` prints") from None
    if not isinstance(data, dict):
        raise PlanError(f"{path} holds no plan")
    if "strategies" in data:
        data = _answer_of(data["strategies"], strategy, path)
    plan = data if "replicas" in data else data.get("plan")
    if plan is None:
        raise PlanError(f"{path} holds no plan{': ' + data['no_plan'] if 'no_plan' in data else ''}")
    return plan


def _answer_of(answers: dict[str, Any], strategy: str | None, path: Path) -> dict[str, Any]:
    names = ", ".join(answers)
    if strategy is None and len(answers) != 1:
        mend = "choose with --strategy of `resihp plan` or `resihp apply`"
        raise PlanError(f"{path} has plans of several strategies; {mend}: {names}")
    name = strategy or next(iter(answers))
    if name not in answers:
        raise PlanError(f"{path} has no plan of strategy {name}; it has {names}")
    answer: dict[str, Any] = answers[name]
    return answer
