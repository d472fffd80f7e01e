# SPDX-License-Identifier: Apache-2.0
"""The routes of ops' results: every worker's steps, with the messages of each step. Imports `plan` only.

All members of a stage run the same ops in the same order, so that their collectives match. Stages may differ in
tensor-parallel degree, and replicas in everything. A migrated op's neighbours may be in another replica.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from megatron_resihp.executor.messages import Message
from megatron_resihp.plan import ParallelPlan, PlannedOp

Orders = Sequence[Sequence[Sequence[PlannedOp]]]
"""The ops of each stage of each replica, in the order in which it runs them: orders[replica][stage]."""

Place = tuple[int, int]
"""A replica and one of its stages."""

End = Message | PlannedOp | None
"""The source of an op's input or the destination of its result: a message, an op of the same stage, or nothing."""

AHEAD: Final = 2
"""A worker has posted receives for this many messages beyond the next one, so that they arrive while it computes."""


class RouteError(ValueError):
    """An op's result can't reach the ops that need it; the message names the op."""


@dataclass(frozen=True)
class Step:
    """An op of a worker, and what happens around it.

    Attributes:
        op: the computed op.
        source: the op's input: a message, the kept result of an op of this stage, or nothing (the first chunk's F, the
            last chunk's B, and W).
        target: the destination of its result: a message, an op of this stage (the result is kept), or nothing.
        receives: messages whose receives are posted before this step, besides those of earlier steps, in this order.
            Between each two workers it is the sending order.
        settled: messages sent in earlier steps that have certainly been received once `source` has arrived.
    """

    op: PlannedOp
    source: End
    target: End
    receives: tuple[Message, ...] = ()
    settled: tuple[Message, ...] = ()


def routes_for(
    plan: ParallelPlan, orders: Orders, worker: int, sequence_parallel: bool, tokens: int, ahead: int = AHEAD
) -> tuple[Step, ...]:
    """The steps of a worker; none if the plan gives it no work.

    Args:
        plan: the plan in force.
        orders: the ops of all stages of all replicas; without any B, those of an evaluation.
        worker: its id.
        sequence_parallel: whether between layers each member of a stage has its own part of the tokens.
        tokens: sequence length of a micro-batch.
        ahead: the number of messages beyond the next one for which to post receives.

    Raises:
        RouteError: an op that another op needs is in no stage's order, an op is listed twice, or an op isn't the
            plan's.
    """
    replica, coordinate = plan.replica_of(worker), plan.coordinate_of(worker)
    if replica is None or coordinate is None:
        return ()
    return _Network(plan, orders, sequence_parallel, tokens).steps((replica, coordinate.stage), ahead)


def all_routes(
    plan: ParallelPlan, orders: Orders, sequence_parallel: bool, tokens: int, ahead: int = AHEAD,
    replicas: Collection[int] | None = None,
) -> dict[int, tuple[Step, ...]]:  # fmt: skip
    """The steps of each worker that has work; arguments and errors as of `routes_for`.

    Args:
        replicas: whose workers are wanted; None: all.
    """
    network = _Network(plan, orders, sequence_parallel, tokens)
    routes = {}
    for place, members in network.members.items():
        if replicas is not None and place[0] not in replicas:
            continue
        steps = network.steps(place, ahead)
        routes.update(dict.fromkeys(members, steps))
    return routes


class _Network:
    """The stage that runs each op, and the stage that needs its result."""

    def __init__(self, plan: ParallelPlan, orders: Orders, split: bool, tokens: int) -> None:
        self.members: dict[Place, tuple[int, ...]] = {
            (number, stage): members
            for number, replica in enumerate(plan.replicas)
            for stage, members in enumerate(replica.stages)
        }
        self._split = split
        self._tokens = tokens
        self._chunks = {m: len(replica.stage_of_chunk) for replica in plan.replicas for m in replica.micro_batches}
        self._most_chunks = max(self._chunks.values())
        self._orders = {
            (number, stage): order
            for number, replica_orders in enumerate(orders)
            for stage, order in enumerate(replica_orders)
        }
        self._found: dict[PlannedOp, tuple[Place, int]] = {}
        for place, order in self._orders.items():
            self._enter(place, order)

    def _enter(self, place: Place, order: Sequence[PlannedOp]) -> None:
        for index, op in enumerate(order):
            if op in self._found:
                raise RouteError(f"op {op} stands twice")
            if op.chunk >= self._chunks.get(op.micro_batch, 0):
                raise RouteError(f"op {op} is of a micro-batch or a chunk that no replica has")
            self._found[op] = (place, index)

    def steps(self, place: Place, ahead: int) -> tuple[Step, ...]:
        order = self._orders[place]
        sources = [self._source(op, place) for op in order]
        targets = [self._target(op, place) for op in order]
        receives, settled = self._receives(sources, ahead), self._settled(sources, targets)
        return tuple(map(Step, order, sources, targets, receives, settled))

    def _source(self, op: PlannedOp, place: Place) -> End:
        needed = self._neighbour(op, towards_target=False)
        if needed is None:
            return None
        sender = self._place(needed, op)
        return needed if sender == place else self._message(needed, sender, place)

    def _target(self, op: PlannedOp, place: Place) -> End:
        user = self._neighbour(op, towards_target=True)
        if user is None:
            return None
        receiver = self._place(user, op)
        return user if receiver == place else self._message(op, place, receiver)

    def _neighbour(self, op: PlannedOp, towards_target: bool) -> PlannedOp | None:
        """The op that uses an op's result, or the op whose result it uses."""
        if op.kind == "W":
            return None
        chunk = op.chunk + (1 if (op.kind == "F") == towards_target else -1)
        return op._replace(chunk=chunk) if 0 <= chunk < self._chunks[op.micro_batch] else None

    def _place(self, op: PlannedOp, neighbour: PlannedOp) -> Place:
        if op not in self._found:
            raise RouteError(f"op {op} is in no stage's order, and {neighbour} stands beside it")
        return self._found[op][0]

    def _message(self, op: PlannedOp, sender: Place, receiver: Place) -> Message:
        tag = (op.micro_batch * self._most_chunks + op.chunk) * 2 + (op.kind == "B")
        return Message(op, self.members[sender], self.members[receiver], self._tokens, self._split, tag)

    def _receives(self, sources: Sequence[End], ahead: int) -> list[tuple[Message, ...]]:
        """For each step, the messages whose receives are posted there and not in an earlier step."""
        needed = [source for source in sources if isinstance(source, Message)]
        sent: dict[Place, list[Message]] = defaultdict(list)
        for message in sorted(needed, key=lambda message: self._found[message.op]):
            sent[self._found[message.op][0]].append(message)
        number = {message.op: index for messages in sent.values() for index, message in enumerate(messages)}
        ready: Counter[Place] = Counter()

        def up_to(message: Message) -> list[Message]:
            """The message, after the messages that the same sender sends before it and that are not posted yet."""
            sender = self._found[message.op][0]
            first, end = ready[sender], number[message.op] + 1
            ready[sender] = max(first, end)
            return sent[sender][first:end]

        receives, taken, passed = [], 0, 0
        for source in sources:
            passed += isinstance(source, Message)
            receives.append(tuple(each for message in needed[taken : passed + ahead] for each in up_to(message)))
            taken = passed + ahead
        return receives

    def _settled(self, sources: Sequence[End], targets: Sequence[End]) -> list[tuple[Message, ...]]:
        """For each step, the messages that its source's sender had certainly used by then, each listed once."""
        under_way: dict[Place, list[tuple[int, Message]]] = defaultdict(list)
        settled = []
        for source, target in zip(sources, targets, strict=True):
            used: tuple[Message, ...] = ()
            if isinstance(source, Message):
                sender, index = self._found[source.op]
                used = tuple(message for user, message in under_way[sender] if user <= index)
                under_way[sender] = [(user, message) for user, message in under_way[sender] if user > index]
            settled.append(used)
            if isinstance(target, Message):
                user_op = self._neighbour(target.op, towards_target=True)
                assert user_op is not None
                receiver, user = self._found[user_op]
                under_way[receiver].append((user, target))
        return settled
