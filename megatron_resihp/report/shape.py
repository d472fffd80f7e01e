"""A plan as it stands in an epoch_started event -> who works, who stands by, and its shape in words.

May import: the standard library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

Plan = Mapping[str, Any]


def working(plan: Plan) -> set[int]:
    """Ids of the workers that the plan gives work."""
    return {worker for replica in plan["replicas"] for stage in replica["stages"] for worker in stage}


def standbys(plan: Plan) -> set[int]:
    """Ids of the live workers that the plan gives no work."""
    return {int(worker) for worker in plan.get("standbys") or {}}


def describe(plan: Plan) -> str:
    """For example "DP2 PP2 TP2", or "DP3: 2x PP2 TP2, 1x PP2 TP2/1" where replicas differ."""
    shapes = Counter(_replica(replica["stages"]) for replica in plan["replicas"])
    degree = f"DP{len(plan['replicas'])}"
    if len(shapes) == 1:
        return f"{degree} {next(iter(shapes))}"
    return f"{degree}: " + ", ".join(f"{count}x {shape}" for shape, count in shapes.items())


def _replica(stages: list[list[int]]) -> str:
    sizes = [len(stage) for stage in stages]
    # One number where all stages agree; "2/1" spells out stage by stage where they do not.
    tensor = str(sizes[0]) if len(set(sizes)) == 1 else "/".join(map(str, sizes))
    return f"PP{len(stages)} TP{tensor}"
