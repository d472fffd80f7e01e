# SPDX-License-Identifier: Apache-2.0
"""Checks that every worker gets through its meetings, even if each holds up all that its worker does after it.

Imports `plan` and this package's order; no torch, since the coordinator checks plans with this.
"""

from collections.abc import Mapping, Sequence

from megatron_resihp.executor.alike import unlike_replicas
from megatron_resihp.executor.direct.order import Meeting, in_agreed_order, meetings
from megatron_resihp.executor.routes import Orders, RouteError, all_routes
from megatron_resihp.pipeline.orders import orders_of
from megatron_resihp.plan import ParallelPlan


def check_order_of_plan(plan: ParallelPlan, sequence_parallel: bool, tokens: int) -> None:
    """Compare what all workers do together under a plan, before any worker does it.

    All sums of gradients come after all ops, in one order for all workers, and each names the same workers to all of
    them. So whoever gets through its ops gets through its sums, and these need no check.

    Args:
        plan, sequence_parallel, tokens: as of `route_check.check_plan`, which has found nothing.

    Raises:
        RouteError: a worker would wait forever.
    """
    check_order(plan, [orders_of(replica) for replica in plan.replicas], sequence_parallel, tokens)


def check_order(plan: ParallelPlan, orders: Orders, sequence_parallel: bool, tokens: int) -> None:
    """`check_order_of_plan` for these orders of ops, by one of the replicas that are alike."""
    routes = all_routes(plan, orders, sequence_parallel, tokens, replicas=unlike_replicas(plan, orders))
    check_meetings(meetings(in_agreed_order(routes), (), tuple(routes)))


def check_meetings(of: Mapping[int, Sequence[Meeting]]) -> None:
    """Let all workers meet; each stays at a meeting until it has met all its peers there.

    Raises:
        RouteError: some worker never gets on.
    """
    at = dict.fromkeys(of, 0)
    missing = {worker: set(each[0].peers) for worker, each in of.items() if each}
    able = sorted(missing)
    while able:
        worker = able.pop()
        if worker not in missing:
            continue
        meeting = of[worker][at[worker]]
        for peer in list(missing[worker]):
            there = peer in missing and of[peer][at[peer]].what == meeting.what
            if there and worker in missing[peer]:
                missing[worker].discard(peer)
                missing[peer].discard(worker)
                able += [peer] if not missing[peer] else []
        if not missing[worker]:
            del missing[worker]
            at[worker] += 1
            if at[worker] < len(of[worker]):
                missing[worker] = set(of[worker][at[worker]].peers)
                able.append(worker)
    for worker, peers in missing.items():
        names = ", ".join(map(str, sorted(peers)))
        raise RouteError(
            f"worker {worker} waits at {of[worker][at[worker]]} for workers {names}, which never come there"
        )
