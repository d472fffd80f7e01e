# SPDX-License-Identifier: Apache-2.0
"""Rows: the tensor-parallel groups that run a stage in all replicas that share, and so wait for each other.

Imports the standard library, `plan`, `cost` and this package.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import batched
from math import isfinite

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.parallel_plan import sharing_of
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.common import Group, groups_in_nodes, position_of, speed_of


@dataclass(frozen=True)
class Team:
    """A tensor-parallel group of live workers.

    Attributes:
        members: in tensor-parallel order.
        stage, replica: where it works; -1 if nowhere yet.
        speed: of its slowest member.
        node: where it lives.
        whole: whether it is a group of the plan in force as it is.
    """

    members: Group
    stage: int
    replica: int
    speed: float
    node: int
    whole: bool


Row = tuple[Team, ...]


def teams_of(plan: ParallelPlan, health: Health, cost: JobCost) -> list[Team]:
    """The plan's groups that lost nobody, and new ones of other live workers of a node."""
    degree = max(plan.replicas[0].shape)
    old = [members for replica in plan.replicas for members in replica.stages]
    whole = {members for members in old if members and all(worker in health.speed for worker in members)}
    busy = {worker for members in whole for worker in members}
    new = groups_in_nodes((worker for worker in health.live if worker not in busy), degree, plan, health, cost)

    def team(members: Group) -> Team:
        at = position_of(members, plan)
        replica, stage = (int(each) if isfinite(each) else -1 for each in at)
        node = members[0] // cost.workers_per_node
        return Team(members, stage, replica, speed_of(members, health), node, members in whole)

    return [team(members) for members in (*sorted(whole), *new)]


def speed_of_row(row: Row) -> float:
    """Of the slowest one, for which all wait."""
    return min(team.speed for team in row)


def rows_of(
    teams: Iterable[Team], plan: ParallelPlan, together: int, kept: Callable[[Row], bool],
    seconds: Callable[[Row], float],
) -> dict[int, list[Row]]:  # fmt: skip
    """Rows of each stage, fastest first: those of the plan in force that are left whole, and new ones of the rest.

    Workers stay with their stage, as long as no stage has more rows than others. All stages get as many.

    Args:
        together: how many replicas share.
        kept: whether a row of the plan may stay.
        seconds: how long a row takes, in any unit.
    """
    stages = range(len(plan.replicas[0].stages))
    found: dict[int, list[Row]] = {stage: [] for stage in stages}
    free: dict[int, list[Team]] = {stage: [] for stage in stages}
    pool: list[Team] = []
    for (stage, _), members in _by_place(teams, plan, together).items():
        row = tuple(sorted(members, key=lambda team: team.replica))
        if stage not in found:
            pool += row
        elif len(row) == together and all(team.whole for team in row) and kept(row):
            found[stage].append(row)
        else:
            free[stage] += row
    for stage in stages:
        new, left = _new_rows(free[stage], together)
        found[stage] += new
        pool += left
    count = (together * sum(map(len, found.values())) + len(pool)) // (together * len(stages))
    for stage in stages:
        found[stage].sort(key=seconds)
        pool += [team for row in found[stage][count:] for team in row]
        del found[stage][count:]
    spare, _ = _new_rows(pool, together)
    spare.sort(key=seconds, reverse=True)
    for stage in stages:
        found[stage] += [spare.pop() for _ in range(count - len(found[stage]))]
        found[stage].sort(key=seconds)
    return found


def _by_place(teams: Iterable[Team], plan: ParallelPlan, together: int) -> dict[tuple[int, int], list[Team]]:
    """Teams by stage, and by the row that they may form; rows of fewer replicas are parts of those in force."""
    parts = sharing_of(plan) % together == 0 and not plan.context_groups
    found: dict[tuple[int, int], list[Team]] = defaultdict(list)
    for team in teams:
        found[team.stage, team.replica // together if parts else -1].append(team)
    return found


def _new_rows(teams: Sequence[Team], together: int) -> tuple[list[Row], list[Team]]:
    """Rows of teams of like speed, on one node where there are as many, and the teams that are left over."""
    alike: dict[tuple[float, int], list[Team]] = defaultdict(list)
    for team in sorted(teams, key=lambda team: (-team.speed, team.node, team.replica)):
        alike[team.speed, team.node].append(team)
    near = [each for of in alike.values() for each in batched(of, together) if len(each) == together]
    used = {team.members for row in near for team in row}
    rest = [team for of in alike.values() for team in of if team.members not in used]
    full = len(rest) // together * together
    rows = [*near, *batched(rest[:full], together)]
    # Where it can, each has the place among them that it had, and with it its experts.
    return [tuple(sorted(row, key=lambda team: team.replica % together)) for row in rows], rest[full:]
