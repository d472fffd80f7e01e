# SPDX-License-Identifier: Apache-2.0
"""Checks that workers' steps fit together: each message is received in its sending order, and no op waits forever.

Imports `plan`, `pipeline`'s orders, messages and routes; no torch, since the coordinator checks plans with this.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from megatron_resihp.executor.alike import unlike_replicas
from megatron_resihp.executor.messages import Message
from megatron_resihp.executor.routes import Orders, RouteError, Step, all_routes
from megatron_resihp.pipeline.errors import ProgramError
from megatron_resihp.pipeline.orders import orders_of
from megatron_resihp.plan import ParallelPlan, PlannedOp

Routes = Mapping[int, Sequence[Step]]
"""The steps of each worker."""


def check_plan(plan: ParallelPlan, sequence_parallel: bool, tokens: int) -> None:
    """Compare all workers' steps under a plan with each other, before any worker runs one.

    Args:
        plan: gives its layers.
        sequence_parallel: whether, between layers, each member of a stage has its own part of the tokens.
        tokens: sequence length of a micro-batch.

    Raises:
        RouteError: some op would wait forever; see `check_routes`.
    """
    try:
        orders = [orders_of(replica) for replica in plan.replicas]
    except ProgramError as error:
        raise RouteError(str(error)) from None
    check_orders(plan, orders, sequence_parallel, tokens)


def check_orders(plan: ParallelPlan, orders: Orders, sequence_parallel: bool, tokens: int) -> None:
    """`check_plan` for these orders of ops, by one of the replicas that are alike."""
    check_routes(all_routes(plan, orders, sequence_parallel, tokens, replicas=unlike_replicas(plan, orders)))


def check_routes(routes: Routes) -> None:
    """Compare all workers' steps with each other.

    Raises:
        RouteError: members of a stage run different ops; a message isn't both sent and received, or its senders or
            receivers are wrong; a worker receives a peer's messages in another order than the peer sends them, or later
            than it needs them; a token doesn't cross exactly once; ops wait for each other in a circle.
    """
    for worker, steps in routes.items():
        _check_worker(worker, steps)
    messages = {end.op: end for steps in routes.values() for step in steps for end in _messages(step)}
    # The pieces depend on the senders and receivers, and not on the op.
    alike = {(each.senders, each.receivers, each.tokens, each.split): each for each in messages.values()}
    for message in alike.values():
        _check_tokens(message)
    _check_members(messages, routes)
    _check_ends(messages, routes)
    _check_pairs(routes)
    _check_progress(routes)


def _messages(step: Step) -> Iterator[Message]:
    for end in (step.source, step.target, *step.receives):
        if isinstance(end, Message):
            yield end


def _check_worker(worker: int, steps: Sequence[Step]) -> None:
    """Check one worker alone: it keeps each result before its use, and posts each receive once, before its use."""
    kept: set[PlannedOp] = set()
    ready: set[PlannedOp] = set()
    for step in steps:
        for message in step.receives:
            if message.op in ready:
                raise RouteError(f"worker {worker} takes {message} twice")
            ready.add(message.op)
        if isinstance(step.source, Message) and step.source.op not in ready:
            raise RouteError(f"worker {worker} isn't ready for {step.source} when it runs {step.op}")
        if isinstance(step.source, PlannedOp) and step.op not in kept:
            raise RouteError(f"worker {worker} runs {step.op} before {step.source}, which it needs")
        if isinstance(step.target, PlannedOp):
            kept.add(step.target)


def _check_tokens(message: Message) -> None:
    """Check that each token crosses exactly once, from a worker that has it to a worker that needs it."""
    following = 0
    for piece in message.pieces:
        (first, last), (start, end) = message.held_by(piece.sender), message.sent_to(piece.receiver)
        if piece.start != following or not max(first, start) <= piece.start < piece.end <= min(last, end):
            raise RouteError(f"{message}: token {following} doesn't cross exactly once")
        following = piece.end
    if following != message.tokens:
        raise RouteError(f"{message}: token {following} doesn't cross")


def _check_members(messages: Mapping[PlannedOp, Message], routes: Routes) -> None:
    stages = {members for message in messages.values() for members in (message.senders, message.receivers)}
    for members in stages:
        for ops in zip_longest(*([step.op for step in routes.get(worker, ())] for worker in members)):
            if len(set(ops)) != 1:
                raise RouteError(f"workers {members} of one stage run different ops: {', '.join(map(str, ops))}")


def _check_ends(messages: Mapping[PlannedOp, Message], routes: Routes) -> None:
    """Check that all senders of each message send it once, and that all its receivers use it once."""
    leaves: dict[PlannedOp, list[int]] = defaultdict(list)
    used: dict[PlannedOp, list[int]] = defaultdict(list)
    for worker, steps in routes.items():
        for step in steps:
            if isinstance(step.target, Message):
                leaves[step.op].append(worker)
            if isinstance(step.source, Message):
                used[step.source.op].append(worker)
    for op, message in messages.items():
        if sorted(leaves[op]) != sorted(message.senders):
            raise RouteError(f"{message} should leave workers {message.senders} and leaves {leaves[op]}")
        if sorted(used[op]) != sorted(message.receivers):
            raise RouteError(f"{message} should reach workers {message.receivers} and is used by {used[op]}")


def _check_pairs(routes: Routes) -> None:
    """Check that each worker receives a peer's messages in the order in which the peer sends them."""
    sent: dict[tuple[int, int], list[PlannedOp]] = defaultdict(list)
    taken: dict[tuple[int, int], list[PlannedOp]] = defaultdict(list)
    for worker, steps in routes.items():
        for step in steps:
            for message in step.receives:
                for piece in message.pieces:
                    if piece.receiver == worker:
                        taken[piece.sender, worker].append(message.op)
            if isinstance(step.target, Message):
                for piece in step.target.pieces:
                    if piece.sender == worker:
                        sent[worker, piece.receiver].append(step.op)
    for pair in sent.keys() | taken.keys():
        if sent[pair] != taken[pair]:
            op = next((a for a, b in zip(sent[pair], taken[pair], strict=False) if a != b), None)
            op = op or max(sent[pair], taken[pair], key=len)[min(len(sent[pair]), len(taken[pair]))]
            raise RouteError(f"op {op}: worker {pair[1]} doesn't take results of worker {pair[0]} as they are sent")


def _check_progress(routes: Routes) -> None:
    """Simulate all steps; a step waits until all senders of its source have computed it."""
    at = {worker: 0 for worker in routes}
    left: dict[PlannedOp, int] = {}
    waiting: dict[PlannedOp, list[int]] = defaultdict(list)
    able = list(routes)
    while able:
        worker = able.pop()
        while at[worker] < len(routes[worker]):
            step = routes[worker][at[worker]]
            if isinstance(step.source, Message) and left.get(step.source.op, 1):
                waiting[step.source.op].append(worker)
                break
            at[worker] += 1
            if isinstance(step.target, Message):
                left[step.op] = left.get(step.op, len(step.target.senders)) - 1
                if not left[step.op]:
                    able += waiting.pop(step.op, [])
    for worker, steps in routes.items():
        if at[worker] < len(steps):
            op = steps[at[worker]].op
            raise RouteError(f"op {op} waits for an op that waits for it: ops must not wait in a circle")
