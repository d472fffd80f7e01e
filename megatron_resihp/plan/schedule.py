# SPDX-License-Identifier: Apache-2.0
"""The order in which a replica's stages run their ops: a named schedule, or every op. May import `coding`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final, NamedTuple

from megatron_resihp.coding import Form, decode, omitted_if
from megatron_resihp.plan.errors import PlanError
from megatron_resihp.plan.layers import Chunk, in_turns

ONE_F_ONE_B: Final = "1f1b"
INTERLEAVED: Final = "interleaved"
ZERO_BUBBLE: Final = "zero-bubble-h1"
EXPLICIT: Final = "explicit"
NAMES: Final = (ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, EXPLICIT)

KINDS: Final = "FBW"


class PlannedOp(NamedTuple):
    """An op of a stage. "F3.1" is the forward of micro-batch 3 through chunk 1.

    Attributes:
        kind: "F", "B" or "W"; if the replica has no W, B is the whole backward.
        chunk: index among the replica's chunks (without chunks, the stage).
        micro_batch: index in the global batch; with migrations, it may be another replica's.
    """

    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> "PlannedOp":
        """Raises PlanError if the text is no op."""
        micro_batch, dot, chunk = text[1:].partition(".")
        if text[:1] not in KINDS or not (dot and micro_batch.isdecimal() and chunk.isdecimal()):
            raise PlanError(f"{text!r} is not an op; an op is like F3.1: forward, micro-batch 3, chunk 1")
        return cls(text[0], int(chunk), int(micro_batch))


def _in_words(order: Sequence[PlannedOp]) -> str:
    return " ".join(map(str, order))


def _parsed(text: object) -> tuple[PlannedOp, ...]:
    return tuple(map(PlannedOp.parse, decode(str, text).split()))


Order = Annotated[tuple[PlannedOp, ...], Form(_in_words, _parsed)]
"""In JSON, the ops are words separated by spaces."""


@dataclass(frozen=True)
class Schedule:
    """The order of a replica's ops.

    Attributes:
        name: one of NAMES; the first three are those of `pipeline.schedules`.
        group_size: for "interleaved", the micro-batches that a stage runs through one chunk before it turns to the
            next; None means the smallest number that works.
        orders: for "explicit", each stage's ops in the order in which it runs them.

    Raises:
        PlanError: on construction, for an unknown name, or for parts that do not belong to the name.
    """

    name: str
    group_size: int | None = omitted_if(None)
    orders: tuple[Order, ...] = omitted_if(())

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise PlanError(f"unknown schedule {self.name!r}; known are {', '.join(NAMES)}")
        if self.group_size is not None and (self.name != INTERLEAVED or self.group_size < 1):
            raise PlanError(f"schedule {self.name} with groups of {self.group_size}: only interleaved has groups")
        if bool(self.orders) != (self.name == EXPLICIT):
            raise PlanError(f"schedule {self.name}: an explicit schedule, and no other, lists its ops")

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are separate ops."""
        return self.name == ZERO_BUBBLE or any(op.kind == "W" for order in self.orders for op in order)

    @cached_property
    def known_to_run(self) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Where an explicit schedule is known to run: the stage of each chunk, and the replica's micro-batches.

        Only `plan.rules` adds to it, after it has checked ops that wait for no other replica. So the ops are checked
        once, however many plans hold this schedule.
        """
        return set()

    def renamed(self, before: Sequence[int], after: Sequence[int]) -> "Schedule":
        """The same order for other micro-batches; it is known to run wherever this schedule is.

        Args:
            before: the micro-batches of the ops.
            after: their new indices, all different.
        """
        if not self.orders or tuple(before) == tuple(after):
            return self
        name = dict(zip(before, after, strict=True))
        orders = tuple(
            tuple(PlannedOp(kind, chunk, name[micro_batch]) for kind, chunk, micro_batch in order)
            for order in self.orders
        )
        found = Schedule(self.name, self.group_size, orders)
        if len(set(after)) == len(name):
            known = ((homes, mine) for homes, mine in self.known_to_run if name.keys() == set(mine))
            found.known_to_run.update((homes, tuple(name[each] for each in mine)) for homes, mine in known)
        return found

    def check_shape(self, stages: int, chunks: Sequence[Chunk], micro_batches: int) -> None:
        """Raises PlanError if a replica of this shape cannot run this schedule."""
        homes = [chunk.stage for chunk in chunks] or list(range(stages))
        if self.name == EXPLICIT:
            if len(self.orders) != stages:
                raise PlanError(f"ops are listed for {len(self.orders)} of {stages} stages")
        elif self.name == INTERLEAVED:
            if not in_turns(homes, stages):
                raise PlanError("interleaved needs chunks that are dealt to the stages in turns")
            self._check_groups(stages, micro_batches)
        elif homes != list(range(stages)):
            raise PlanError(f"{self.name} needs one chunk for each stage, in order")

    def _check_groups(self, stages: int, micro_batches: int) -> None:
        group = min(self.group_size or micro_batches, micro_batches)
        smallest = micro_batches % group or group
        if smallest < min(stages, micro_batches):
            raise PlanError(f"interleaved: a group of {smallest} micro-batches is smaller than the {stages} stages")


def check_order(order: Sequence[PlannedOp], expected: Iterable[tuple[int, int]], splits_backward: bool) -> None:
    """Raises PlanError unless a stage runs every op of its (chunk, micro-batch) pairs once, F before B before W."""
    kinds = KINDS if splits_backward else KINDS[:2]
    wanted = {PlannedOp(kind, *pair) for pair in expected for kind in kinds}
    seen: set[PlannedOp] = set()
    for op in order:
        if op in seen:
            raise PlanError(f"op {op} stands twice")
        if op not in wanted:
            raise PlanError(f"op {op} is none of this stage's")
        before = KINDS[: KINDS.index(op.kind)][-1:]
        if before and op._replace(kind=before) not in seen:
            raise PlanError(f"op {op} stands before its {before}")
        seen.add(op)
    if wanted - seen:
        raise PlanError(f"op {min(wanted - seen)} is missing")


def stuck_op(orders: Sequence[Sequence[PlannedOp]], last_chunk: Mapping[int, int]) -> PlannedOp | None:
    """An op that would wait forever for another stage; None if all ops can run.

    Args:
        orders: the valid orders of all stages, in all replicas that send each other results.
        last_chunk: of each micro-batch, the last chunk of its own replica.
    """
    done: set[PlannedOp] = set()
    following = [0] * len(orders)
    waiting: dict[PlannedOp, int] = {}
    ready = list(range(len(orders)))
    while ready:
        place = ready.pop()
        while following[place] < len(orders[place]):
            op = orders[place][following[place]]
            needed = _needed(op, last_chunk[op.micro_batch])
            if needed is not None and needed not in done:
                waiting[needed] = place
                break
            done.add(op)
            following[place] += 1
            if op in waiting:
                ready.append(waiting.pop(op))
    return next((order[at] for order, at in zip(orders, following, strict=True) if at < len(order)), None)


def _needed(op: PlannedOp, last_chunk: int) -> PlannedOp | None:
    """The op of another chunk whose result this op needs."""
    if op.kind == "F" and op.chunk > 0:
        return op._replace(chunk=op.chunk - 1)
    if op.kind == "B" and op.chunk < last_chunk:
        return op._replace(chunk=op.chunk + 1)
    return None
