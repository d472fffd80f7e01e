# SPDX-License-Identifier: Apache-2.0
"""The order in which workers meet: the same for all, and no worker waits for one that waits for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_plans import Case, draw_alike, draw_case

from megatron_resihp.executor.alike import unlike_replicas
from megatron_resihp.executor.direct.order import Meeting, SliceSum, in_agreed_order, meetings, slice_sums
from megatron_resihp.executor.direct.order_check import check_meetings, check_order, check_order_of_plan
from megatron_resihp.executor.route_check import check_orders, check_routes
from megatron_resihp.executor.routes import RouteError, Step, all_routes
from megatron_resihp.pipeline.orders import orders_of
from megatron_resihp.plan import Chunk, ParallelPlan, PlannedOp, Replica

TWO_STAGES = ParallelPlan((Replica(((0, 1), (2,)), (0, 1, 2), (Chunk(0, 0, 2), Chunk(1, 2, 4))),))


def draw(seed: int) -> tuple[Case, random.Random]:
    """Some of the plans have a standby, which keeps what one of the workers holds."""
    source = random.Random(seed)
    case = draw_case(source)
    if source.random() < 0.5:
        kept = case.plan.shards_of(source.choice(case.plan.working))
        case = case._replace(plan=replace(case.plan, standbys={100: kept}))
    return case, source


class TestAnyPlan:
    @given(st.integers(0, 10**6), st.booleans(), st.sampled_from([None, 0]))
    def test_every_worker_gets_through(self, seed: int, split: bool, tied: int | None) -> None:
        (plan, orders), source = draw(seed)
        tied_head = None if tied is None else plan.replicas[0].chunks[-1].end - 1
        routes = in_agreed_order(all_routes(plan, orders, split, source.randint(1, 9)))
        check_routes(routes)
        check_meetings(meetings(routes, slice_sums(plan, tied_head), plan.members))

    @given(st.integers(0, 10**6))
    def test_a_worker_that_sees_its_part_of_it_finds_the_same_order(self, seed: int) -> None:
        """Each worker computes the order for itself, and mixes nothing of its own in."""
        (plan, orders), _ = draw(seed)
        routes = all_routes(plan, orders, False, 8)
        shuffled = dict(sorted(routes.items(), reverse=True))
        assert in_agreed_order(routes) == in_agreed_order(shuffled)

    @given(st.integers(0, 10**6))
    def test_every_slice_is_summed_once_by_all_that_hold_it(self, seed: int) -> None:
        (plan, _), _ = draw(seed)
        sums = slice_sums(plan, None)
        pieces = [piece for each in sums for piece in each.slices]
        assert len(pieces) == len(set(pieces))
        for each in sums:
            assert set(each.contributors) <= set(each.holders) and each.contributors

    @given(st.integers(0, 10**6))
    def test_two_meetings_in_another_order_are_noticed(self, seed: int) -> None:
        (plan, orders), source = draw(seed)
        routes = in_agreed_order(all_routes(plan, orders, False, 8))
        found = meetings(routes, slice_sums(plan, None), plan.members)
        pairs = [
            (worker, number) for worker, own in found.items() for number in range(len(own) - 1)
            if set(own[number].peers) & set(own[number + 1].peers)
        ]  # fmt: skip
        if not pairs:
            return
        worker, number = source.choice(pairs)
        own = list(found[worker])
        own[number], own[number + 1] = own[number + 1], own[number]
        with pytest.raises(RouteError, match="which never come there"):
            check_meetings(found | {worker: own})


def refusal(check: Callable[[], None]) -> str | None:
    """Why a check refuses a plan; None: it doesn't."""
    try:
        check()
    except RouteError as error:
        return str(error)
    return None


class TestOneReplicaOfEachKind:
    """Checking those refuses what checking all workers one by one refuses, in the same words."""

    @settings(max_examples=300)
    @given(st.integers(0, 10**9), st.booleans())
    def test_of_routes(self, seed: int, split: bool) -> None:
        plan, orders = draw_alike(random.Random(seed))
        whole = refusal(lambda: check_routes(all_routes(plan, orders, split, 6)))
        assert refusal(lambda: check_orders(plan, orders, split, 6)) == whole

    @settings(max_examples=300)
    @given(st.integers(0, 10**9), st.booleans(), st.sampled_from([None, 0]))
    def test_of_meetings_and_sums(self, seed: int, split: bool, tied_head: int | None) -> None:
        plan, orders = draw_alike(random.Random(seed))
        assume((refusal(lambda: check_orders(plan, orders, split, 6)) or "circle").endswith("circle"))

        def all_meet() -> None:
            routes = in_agreed_order(all_routes(plan, orders, split, 6))
            check_meetings(meetings(routes, slice_sums(plan, tied_head), plan.members))

        one, every = refusal(lambda: check_order(plan, orders, split, 6)), refusal(all_meet)
        # Of two replicas that wait in a circle, either may be named.
        assert (one and one.split(" ", 2)[2]) == (every and every.split(" ", 2)[2])

    def test_is_enough_where_others_only_have_other_workers_and_micro_batches(self) -> None:
        first, second = (Chunk(0, 0, 2), Chunk(1, 2, 4)), (Chunk(0, 0, 1), Chunk(1, 1, 4))
        stages = [((4 * number, 4 * number + 1), (4 * number + 2, 4 * number + 3)) for number in range(6)]
        stages[4] = (stages[4][1], stages[4][0])  # the one order of everything depends on the lowest worker
        chunks = [first, first, second, first, first, first]
        replicas = [Replica(each, (2 * number, 2 * number + 1), layers)
                    for number, (each, layers) in enumerate(zip(stages, chunks, strict=True))]  # fmt: skip
        plan = ParallelPlan(tuple(replicas))
        orders = [orders_of(replica) for replica in replicas]
        assert unlike_replicas(plan, orders) == [0, 4]
        swapped = [[list(order) for order in own] for own in orders]
        swapped[3][0][0], swapped[5][0][0] = swapped[5][0][0], swapped[3][0][0]
        assert unlike_replicas(plan, swapped) == [0, 3, 4, 5], "these run each other's ops"


class TestOrder:
    def test_receives_stand_where_the_message_is_sent(self) -> None:
        """Not as early as they could, since what is posted first holds up the rest."""
        check_order_of_plan(TWO_STAGES, False, 8)
        routes = routes_of("F0.0 F1.0 F2.0 B0.0 B1.0 B2.0", "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1")
        assert receives(routes[2]) == [["F0.0", "F1.0"], ["F2.0"], [], [], [], []]
        assert receives(routes[0]) == [[], [], [], ["B0.1"], ["B1.1"], ["B2.1"]]

    def test_standbys_get_sums_and_give_nothing(self) -> None:
        plan = replace(TWO_STAGES, standbys={3: TWO_STAGES.shards_of(2)})
        [_, _, _, last] = sorted(slice_sums(plan, None), key=lambda each: each.holders)
        assert (last.holders, last.contributors) == ((2, 3), (2,))
        assert last.collecting(2) == () and last.giving(2) == (3,) and last.giving(3) == (2,)

    def test_what_all_members_hold_counts_once(self) -> None:
        whole = next(each for each in slice_sums(TWO_STAGES, None) if each.holders == (0, 1))
        assert whole.contributors == (0,)


class TestRefused:
    def test_a_circle(self) -> None:
        """Three workers, each of which waits for the next one first."""
        met = {pair: Meeting(("collect", number), ()) for number, pair in enumerate(((0, 1), (1, 2), (2, 0)))}
        orders = {
            first: (met[first, second]._replace(peers=(second,)), met[third, first]._replace(peers=(third,)))
            for first, second, third in ((0, 1, 2), (1, 2, 0), (2, 0, 1))
        }
        with pytest.raises(RouteError, match="waits at collect"):
            check_meetings(orders)

    def test_a_peer_that_expects_no_worker(self) -> None:
        with pytest.raises(RouteError, match="worker 0 waits at give 0 for workers 1, which never come there"):
            check_meetings({0: (Meeting(("give", 0), (1,)),), 1: ()})

    def test_ops_that_wait_in_a_circle(self) -> None:
        with pytest.raises(RouteError, match="waits for an op that waits for it"):
            routes_of("F0.0 B1.0 F1.0 B0.0", "F0.1 B0.1 F1.1 B1.1")


def test_a_sum_of_one_holder_meets_nobody() -> None:
    alone = SliceSum((), (5,), (5,))
    assert alone.collecting(5) == () and alone.giving(5) == ()


def routes_of(*orders: str) -> dict[int, tuple[Step, ...]]:
    """Those of a replica of these stages, with TWO_STAGES' members, in the agreed order."""
    ops = [[PlannedOp.parse(text) for text in order.split()] for order in orders]
    return in_agreed_order(all_routes(TWO_STAGES, [ops], False, 8))


def receives(steps: Sequence[Step]) -> list[list[str]]:
    return [[str(message.op) for message in step.receives] for step in steps]
