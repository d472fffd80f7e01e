# SPDX-License-Identifier: Apache-2.0
"""All strategies by name. Imports the other files of this package."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from megatron_resihp.planner.running import AS_PLANNED, Running
from megatron_resihp.planner.strategies.adaptis import adaptis
from megatron_resihp.planner.strategies.adaptra import adaptra
from megatron_resihp.planner.strategies.by_speed import by_speed
from megatron_resihp.planner.strategies.combined import oobleck_greyhound, recycle_greyhound
from megatron_resihp.planner.strategies.drop_replica import drop_replica
from megatron_resihp.planner.strategies.greyhound import greyhound
from megatron_resihp.planner.strategies.joint import joint
from megatron_resihp.planner.strategies.malleus import malleus
from megatron_resihp.planner.strategies.oobleck import oobleck
from megatron_resihp.planner.strategies.recycle import recycle
from megatron_resihp.planner.strategies.resihp import resihp
from megatron_resihp.planner.strategies.restart import restart
from megatron_resihp.planner.strategies.uniform import uniform
from megatron_resihp.planner.strategy import Strategy


class Change(StrEnum):
    """How a job gets from one plan to the next."""

    IN_PLACE = "in place"
    RESTART = "restart from a checkpoint"


class ReactsTo(StrEnum):
    """Which changes of health make a strategy plan again."""

    DEAD = "dead workers"
    SLOW = "slow workers and links"
    BOTH = "dead and slow workers"


@dataclass(frozen=True)
class Entry:
    """A strategy, and what users and the simulator need to know about it.

    Attributes:
        strategy: the function.
        summary: what it does, in one line for users.
        change: how a job gets to its plans.
        reacts_to: the changes of health for which it makes a new plan.
        running: how its plans are run.
    """

    strategy: Strategy
    summary: str
    change: Change
    reacts_to: ReactsTo
    running: Running = AS_PLANNED


STRATEGIES: Final[Mapping[str, Entry]] = {
    "restart": Entry(
        restart,
        "starts again from the last checkpoint, as complete replicas of the original shape",
        Change.RESTART,
        ReactsTo.DEAD,
    ),
    "drop-replica": Entry(
        drop_replica, "leaves out replicas that lost a worker; the others do their work", Change.IN_PLACE, ReactsTo.DEAD
    ),
    "recycle": Entry(
        recycle,
        "sends micro-batches of dead stages through the same stages of other replicas, into their bubbles",
        Change.IN_PLACE,
        ReactsTo.DEAD,
    ),
    "oobleck": Entry(
        oobleck,
        "gives pipelines that lost a group of workers smaller templates, lets them borrow groups, or merges them",
        Change.IN_PLACE,
        ReactsTo.DEAD,
    ),
    "greyhound": Entry(
        greyhound,
        "distributes micro-batches by speed, then gathers slow workers in few groups and replicas if that pays",
        Change.IN_PLACE,
        ReactsTo.SLOW,
    ),
    "adaptra": Entry(
        adaptra,
        "reorders each pipeline's ops, with more forwards ahead and separate W, to absorb slow links and stages",
        Change.IN_PLACE,
        ReactsTo.SLOW,
    ),
    "recycle+greyhound": Entry(
        recycle_greyhound, "recycle for dead workers, then greyhound for slow ones", Change.IN_PLACE, ReactsTo.BOTH
    ),
    "oobleck+greyhound": Entry(
        oobleck_greyhound, "oobleck for dead workers, then greyhound for slow ones", Change.IN_PLACE, ReactsTo.BOTH
    ),
    "resihp-paper": Entry(
        resihp,
        "makes tensor-parallel groups smaller, gives slow stages fewer layers, and moves work between replicas",
        Change.IN_PLACE,
        ReactsTo.BOTH,
    ),
    "malleus": Entry(
        malleus,
        "groups workers of similar speed, makes pipelines of unequal groups, solves for layers and micro-batches",
        Change.IN_PLACE,
        ReactsTo.BOTH,
    ),
    "adaptis": Entry(
        adaptis,
        "tunes each pipeline: which layers form a stage, which group runs it, and the order of ops",
        Change.IN_PLACE,
        ReactsTo.BOTH,
    ),
    "joint": Entry(
        joint,
        "one search over groups, unequal replicas, layers and uneven micro-batches; this project's own strategy",
        Change.IN_PLACE,
        ReactsTo.BOTH,
    ),
}
"""In the order in which comparisons show the strategies."""

FOR_SHARERS: Final[Mapping[str, Entry]] = {
    "uniform": Entry(
        uniform,
        "as many complete replicas as there are, as running jobs make; as many of these share as take the least time",
        Change.IN_PLACE,
        ReactsTo.DEAD,
    ),
    "by-speed": Entry(
        by_speed,
        "complete replicas, of which those share that are alike in speed; each gets micro-batches by its speed",
        Change.IN_PLACE,
        ReactsTo.BOTH,
    ),
}
"""Of jobs whose replicas share experts or sequences. Of the others only `restart` plans these."""
