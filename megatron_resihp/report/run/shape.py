# SPDX-License-Identifier: Apache-2.0
"""A plan from an epoch_started event -> its working and standby workers, and its shape in words.

May import: the standard library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

Plan = Mapping[str, Any]

FEW = 4
"""The most replicas to list one by one; more replicas are counted by their work."""


def working(plan: Plan) -> set[int]:
    """Ids of the workers that the plan gives work."""
    return {worker for replica in plan["replicas"] for stage in replica["stages"] for worker in stage}


def standbys(plan: Plan) -> set[int]:
    """Ids of the live workers that the plan gives no work."""
    return {int(worker) for worker in plan.get("standbys") or {}}


def describe(plan: Plan) -> str:
    """For example "DP2 PP2 TP2", "DP2 CP2 PP2 TP2" where two replicas share each sequence, "DP2 CP2/1 PP2 TP2" where
    two do and a third one has others for itself, "DP4 EP2 PP2 TP2" where two of four share experts, "DP3 EP3 (3 or 2
    experts each) PP1 TP1" where these are dealt in unequal numbers, or "DP3: 2x PP2 TP2, 1x PP2 TP2/1" where replicas
    differ."""
    shapes, sizes = Counter(_replica(replica["stages"]) for replica in plan["replicas"]), _context(plan)
    groups = f"DP{len(sizes)}" + (f" CP{_counted_down(sizes)}" if max(sizes) > 1 else "")
    groups += f" EP{_experts(plan)}{_dealt(plan)}" if _experts(plan) > 1 else ""
    return f"{groups}{' ' if len(shapes) == 1 else ': '}{_counted(shapes)}"


def layers(plan: Plan, own: Sequence[Sequence[int]]) -> str:
    """Layers of each stage, "5+4" where all replicas agree; or of each replica, "5+4, 6+3". Embedding and head count.

    Args:
        plan: of an event.
        own: the job's own (stage, first, end), for replicas without layers of their own.
    """
    of_replicas = [_layers(replica.get("chunks") or own) for replica in plan["replicas"]]
    counts = Counter(of_replicas)
    return ", ".join(of_replicas) if 1 < len(counts) <= len(of_replicas) <= FEW else _counted(counts)


def micro_batches(plan: Plan) -> str:
    """Micro-batches of each replica, or of each group that shares sequences, "5+3"; for many the number with each,
    "6x 4, 2x 3"; and the number of micro-batches that another replica runs in part, "4+4, 1 shared".
    """
    ends = accumulate(_context(plan))
    counts = [len(plan["replicas"][end - 1].get("micro_batches") or ()) for end in ends]
    own = "+".join(map(str, counts)) if len(counts) <= FEW else _counted(Counter(map(str, counts)))
    shared = {micro_batch for micro_batch, *_ in plan.get("migrations") or ()}
    return f"{own}, {len(shared)} shared" if shared else own


def same_work(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same stages, layers, micro-batches and orders of ops, whichever workers run them."""
    return _work(one) == _work(other)


def _work(plan: Plan) -> list[Any]:
    of_replicas = [
        {**replica, "stages": [len(members) for members in replica["stages"]]} for replica in plan["replicas"]
    ]
    return [of_replicas, plan.get("migrations"), _context(plan), _experts(plan)]


def _context(plan: Plan) -> list[int]:
    """How many replicas share each sequence, group by group."""
    degree = int(plan.get("context_parallel", 1))
    return list(plan.get("context_groups") or [degree] * (len(plan["replicas"]) // degree))


def _counted_down(sizes: Sequence[int]) -> str:
    """The sizes of groups, "4", or "4/2" where they differ."""
    return "/".join(map(str, sorted(set(sizes), reverse=True)))


def _experts(plan: Plan) -> int:
    """How many replicas share each layer's experts."""
    return int(plan.get("expert_parallel", 1))


def _dealt(plan: Plan) -> str:
    """How many experts each of those that share them has, where their numbers differ."""
    experts = int(plan.get("uneven_experts", 0))
    least = experts // _experts(plan)
    return f" ({least + 1} or {least} experts each)" if experts else ""


def _layers(chunks: Iterable[Sequence[int]]) -> str:
    of_stage: Counter[int] = Counter()
    for stage, first, end in chunks:
        of_stage[stage] += end - first
    return "+".join(str(of_stage[stage]) for stage in sorted(of_stage))


def _counted(counts: Counter[str]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count}x {words}" for words, count in counts.items())


def _replica(stages: list[list[int]]) -> str:
    sizes = [len(stage) for stage in stages]
    # One number where all stages agree; "2/1" spells out stage by stage where they do not.
    tensor = str(sizes[0]) if len(set(sizes)) == 1 else "/".join(map(str, sizes))
    return f"PP{len(stages)} TP{tensor}"
