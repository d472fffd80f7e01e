# SPDX-License-Identifier: Apache-2.0
"""Where results go: every order of ops that a plan may hold gets through, and each token crosses exactly once."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import draw_case

from megatron_resihp.coding import decode
from megatron_resihp.executor.messages import Message, Piece
from megatron_resihp.executor.route_check import check_routes
from megatron_resihp.executor.routes import RouteError, Step, all_routes, routes_for
from megatron_resihp.pipeline.planned import explicit_schedule, program_of
from megatron_resihp.pipeline.search.list_scheduling import list_schedule
from megatron_resihp.plan import Chunk, Migration, ParallelPlan, PlannedOp, Replica, Schedule

Routes = Mapping[int, Sequence[Step]]
F00 = PlannedOp("F", 0, 0)


def message(senders: int, receivers: int, tokens: int, split: bool) -> Message:
    return Message(F00, tuple(range(senders)), tuple(range(10, 10 + receivers)), tokens, split, 0)


def orders_of(plan: ParallelPlan) -> tuple[tuple[tuple[PlannedOp, ...], ...], ...]:
    return tuple(explicit_schedule(program_of(replica), replica.micro_batches).orders for replica in plan.replicas)


class World:
    """Workers whose transfers need both ends and keep the order between each two of them."""

    def __init__(self, routes: Routes, source: random.Random) -> None:
        self.routes = routes
        self.source = source
        self.sent: dict[tuple[int, int], deque[PlannedOp]] = defaultdict(deque)
        self.taken: dict[tuple[int, int], deque[PlannedOp]] = defaultdict(deque)
        self.crossed: set[tuple[PlannedOp, Piece]] = set()
        self.members = {step.op: [w for w in routes if step in routes[w]] for w in routes for step in routes[w]}
        self.at = {worker: 0 for worker in routes}
        self.entered = {worker: -1 for worker in routes}
        self.computed: dict[int, set[PlannedOp]] = {worker: set() for worker in routes}

    def run(self) -> None:
        """Ends when all workers are through; fails where none can move."""
        while left := [worker for worker in self.routes if self.at[worker] < len(self.routes[worker])]:
            self.source.shuffle(left)
            assert any(self.move(worker) for worker in left), f"nobody moves: {self.at}"
        assert not any(self.sent.values()) and not any(self.taken.values())

    def move(self, worker: int) -> bool:
        step = self.routes[worker][self.at[worker]]
        began = self.entered[worker] < self.at[worker]
        if began:
            self.entered[worker] = self.at[worker]
            for each in step.receives:
                self.post(each, worker, receiving=True)
        # Gathering what was received, and what is in the op, are collectives of the stage.
        together = all(step.op in self.computed[w] or self.is_able(w, step) for w in self.members[step.op])
        if not together:
            return began
        self.computed[worker].add(step.op)
        if isinstance(step.target, Message):
            self.post(step.target, worker, receiving=False)
        self.at[worker] += 1
        return True

    def is_able(self, worker: int, step: Step) -> bool:
        """Whether a worker has begun this step, its input is there, and what it takes for settled is."""
        if self.entered[worker] != self.at[worker] or self.routes[worker][self.at[worker]] != step:
            return False
        came = isinstance(step.source, Message) and [p for p in step.source.pieces if p.receiver == worker]
        if came and not all((step.source.op, piece) in self.crossed for piece in came):  # type: ignore[union-attr]
            return False
        return all(
            (each.op, piece) in self.crossed for each in step.settled for piece in each.pieces if piece.sender == worker
        )

    def post(self, each: Message, worker: int, receiving: bool) -> None:
        for piece in each.pieces:
            if worker == (piece.receiver if receiving else piece.sender):
                pair = (piece.sender, piece.receiver)
                (self.taken if receiving else self.sent)[pair].append(each.op)
                self.transfer(pair, each)

    def transfer(self, pair: tuple[int, int], each: Message) -> None:
        while self.sent[pair] and self.taken[pair]:
            op = self.sent[pair].popleft()
            assert op == self.taken[pair].popleft()
            piece = next(piece for piece in self.piece_source(op) if (piece.sender, piece.receiver) == pair)
            assert (op, piece) not in self.crossed
            self.crossed.add((op, piece))

    def piece_source(self, op: PlannedOp) -> Sequence[Piece]:
        for worker in self.members[op]:
            for step in self.routes[worker]:
                if step.op == op and isinstance(step.target, Message):
                    return step.target.pieces
        raise AssertionError(f"{op} sends nothing")


def get_through(routes: Routes, source: random.Random) -> None:
    check_routes(routes)
    World(routes, source).run()


class TestPieces:
    @given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 40), st.booleans())
    def test_each_token_crosses_once(self, senders: int, receivers: int, tokens: int, split: bool) -> None:
        each = message(senders, receivers, tokens, split)
        assert [token for piece in each.pieces for token in range(piece.start, piece.end)] == list(range(tokens))
        assert len({(piece.sender, piece.receiver) for piece in each.pieces}) == len(each.pieces)
        for piece in each.pieces:
            (first, last), (start, end) = each.held_by(piece.sender), each.sent_to(piece.receiver)
            assert max(first, start) <= piece.start < piece.end <= min(last, end)
        shares = [each.sent_to(worker) for worker in each.receivers]
        assert [share[0] for share in shares] == [0, *(share[1] for share in shares[:-1])]
        assert shares[-1][1] == tokens

    def test_the_larger_stage_sets_the_number(self) -> None:
        assert message(4, 2, 8, False).pieces == ((0, 10, 0, 2), (1, 10, 2, 4), (2, 11, 4, 6), (3, 11, 6, 8))
        assert message(1, 2, 8, False).pieces == ((0, 10, 0, 4), (0, 11, 4, 8))
        assert message(3, 2, 7, False).pieces == ((0, 10, 0, 2), (1, 10, 2, 4), (2, 11, 4, 7))

    def test_parts_overlap_with_sequence_parallelism(self) -> None:
        three_to_two = message(3, 2, 6, True)
        assert three_to_two.pieces == ((0, 10, 0, 2), (1, 10, 2, 3), (1, 11, 3, 4), (2, 11, 4, 6))
        assert [three_to_two.held_by(worker) for worker in (0, 1, 2)] == [(0, 2), (2, 4), (4, 6)]


class TestSchedules:
    @pytest.mark.parametrize("split", (False, True), ids=("whole", "split"))
    @pytest.mark.parametrize("schedule", ("1f1b", "zero-bubble-h1", "interleaved"))
    def test_known_by_name(self, schedule: str, split: bool) -> None:
        chunks = 6 if schedule == "interleaved" else 3
        plan = ParallelPlan(
            (
                Replica(
                    ((0, 1), (2,), (3, 4, 5, 6)),
                    tuple(range(5)),
                    tuple(Chunk(number % 3, number, number + 1) for number in range(chunks)),
                    Schedule(schedule),
                ),
            )
        )
        get_through(all_routes(plan, orders_of(plan), split, 16), random.Random(0))

    @settings(max_examples=20)
    @given(st.integers(0, 10**6))
    def test_made_to_measure(self, seed: int) -> None:
        source = random.Random(seed)
        homes = [0, 1, 2, 1, 0, 2]
        seconds = np.random.default_rng(seed).uniform(0.1, 3.0, (3, 6, 4))
        order = explicit_schedule(list_schedule(homes, seconds), range(4))
        chunks = tuple(Chunk(home, number, number + 1) for number, home in enumerate(homes))
        plan = ParallelPlan((Replica(((0,), (1, 2), (3, 4, 5)), tuple(range(4)), chunks, order),))
        get_through(all_routes(plan, orders_of(plan), source.random() < 0.5, 8), source)

    @given(st.integers(0, 10**6), st.booleans(), st.integers(0, 4))
    def test_any_valid_order_with_migrations(self, seed: int, split: bool, ahead: int) -> None:
        source = random.Random(seed)
        plan, orders = draw_case(source)
        routes = all_routes(plan, orders, split, source.randint(1, 9), ahead)
        assert sorted(op for worker in routes for op in {step.op for step in routes[worker]}) == sorted(
            op for replica, stages in zip(plan.replicas, orders, strict=True)
            for members, order in zip(replica.stages, stages, strict=True) for op in order for _ in members
        )  # fmt: skip
        get_through(routes, source)

    def test_an_evaluation_has_forwards_only(self) -> None:
        plan, orders = draw_case(random.Random(5))
        forwards = [[[op for op in order if op.kind == "F"] for order in stages] for stages in orders]
        get_through(all_routes(plan, forwards, False, 8), random.Random(0))


class TestSteps:
    # Stage 1 of replica 0 is dead; replica 1 does its work, with stages of other degrees.
    plan = ParallelPlan(
        (
            Replica(
                ((0, 1), ()), (0, 2), schedule=decode(Schedule,
                    {"name": "explicit", "orders": ["F0.0 F2.0 B0.0 B2.0", ""]}
                ),
            ),
            Replica(
                ((2,), (3, 4)), (1,), schedule=decode(Schedule,
                    {"name": "explicit", "orders": ["F1.0 B1.0", "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1"]}
                ),
            ),
        ),
        migrations=(Migration(0, 1, 1), Migration(2, 1, 1)),
    )  # fmt: skip

    def steps(self, worker: int, ahead: int = 1) -> tuple[Step, ...]:
        return routes_for(self.plan, orders_of_plan(self.plan), worker, False, 8, ahead)

    def test_migrated_work_crosses_between_replicas(self) -> None:
        first = self.steps(1)[0]
        assert isinstance(first.target, Message)
        assert (first.op, first.target.senders, first.target.receivers) == (F00, (0, 1), (3, 4))
        assert self.steps(3)[0].source == first.target

    def test_members_of_a_stage_run_the_same_steps(self) -> None:
        assert self.steps(3) == self.steps(4)

    def test_who_has_no_work_has_no_steps(self) -> None:
        assert routes_for(self.plan, orders_of_plan(self.plan), 9, False, 8) == ()

    def test_a_worker_is_ready_for_some_messages_ahead(self) -> None:
        assert [len(step.receives) for step in self.steps(3, ahead=0)] == [1, 0, 1, 0, 1, 0]
        assert [len(step.receives) for step in self.steps(3, ahead=1)] == [2, 0, 1, 0, 0, 0]

    def test_a_gradient_says_that_the_activation_has_been_used(self) -> None:
        forward, _, backward, _ = self.steps(0)
        assert backward.settled == (forward.target,)

    def test_what_the_peer_has_not_come_to_is_not_settled(self) -> None:
        chunks = tuple(Chunk(number % 2, number, number + 1) for number in range(4))
        order = decode(Schedule, {"name": "explicit", "orders": [
            "F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0", "F0.1 F0.3 F1.1 F1.3 B0.3 B1.3 B0.1 B1.1"
        ]})  # fmt: skip
        plan = ParallelPlan((Replica(((0,), (1,)), (0, 1), chunks, order),))
        routes = all_routes(plan, orders_of(plan), False, 8, ahead=0)
        sent = [step.target for step in routes[0]]
        assert [step.settled for step in routes[0][:5]] == [(), (), (sent[0],), (sent[1], sent[2]), (sent[3],)]
        get_through(routes, random.Random(0))

    def test_neighbours_in_one_stage_keep_the_result(self) -> None:
        plan = ParallelPlan((Replica(((0,),), (0,), (Chunk(0, 0, 1), Chunk(0, 1, 2)), Schedule("interleaved")),))
        routes = all_routes(plan, orders_of(plan), False, 8)
        check_routes(routes)
        assert [(str(step.op), str(step.source), str(step.target)) for step in routes[0]] == [
            ("F0.0", "None", "F0.1"), ("F0.1", "F0.0", "None"), ("B0.1", "None", "B0.0"), ("B0.0", "B0.1", "None"),
        ]  # fmt: skip


def orders_of_plan(plan: ParallelPlan) -> Any:
    return [replica.schedule.orders for replica in plan.replicas if replica.schedule]


class TestRefused:
    plan = ParallelPlan((Replica(((0, 1), (2,)), (0, 1)),))
    orders = orders_of(plan)

    def routes(self) -> dict[int, list[Step]]:
        return {worker: list(steps) for worker, steps in all_routes(self.plan, self.orders, False, 8).items()}

    def refused(self, routes: Routes, match: str) -> None:
        with pytest.raises(RouteError, match=match):
            check_routes(routes)

    def test_an_op_that_nobody_runs(self) -> None:
        missing = [[[op for op in order if str(op) != "B1.1"] for order in self.orders[0]]]
        with pytest.raises(RouteError, match=r"op B1\.1 is in no stage's order"):
            all_routes(self.plan, missing, False, 8)

    def test_an_op_that_two_run(self) -> None:
        twice = [[[*self.orders[0][0], *self.orders[0][1][:1]], self.orders[0][1]]]
        with pytest.raises(RouteError, match=r"op F0\.1 stands twice"):
            all_routes(self.plan, twice, False, 8)

    def test_a_foreign_op(self) -> None:
        with pytest.raises(RouteError, match=r"op F7\.0 is of a micro-batch or a chunk that no replica has"):
            all_routes(self.plan, [[[PlannedOp("F", 0, 7)], []]], False, 8)

    def test_a_message_that_is_not_sent(self) -> None:
        routes = self.routes()
        routes[1][0] = replace(routes[1][0], target=None)
        self.refused(routes, r"result of F0\.0 should leave workers \(0, 1\)")

    def test_a_message_that_is_not_used(self) -> None:
        routes = self.routes()
        at = next(i for i, step in enumerate(routes[0]) if isinstance(step.source, Message))
        routes[0][at] = replace(routes[0][at], source=None)
        self.refused(routes, r"result of B0\.1 should reach workers \(0, 1\)")

    def test_receives_in_another_order_than_sends(self) -> None:
        routes = self.routes()
        routes[2][0] = replace(routes[2][0], receives=routes[2][0].receives[::-1])
        self.refused(routes, r"op F0\.0: worker 2 doesn't take results of worker \d as they are sent")

    def test_a_receive_that_is_forgotten(self) -> None:
        routes = self.routes()
        routes[2][0] = replace(routes[2][0], receives=routes[2][0].receives[1:])
        self.refused(routes, r"worker 2 isn't ready for the result of F0\.0")

    def test_members_with_unlike_orders(self) -> None:
        routes = self.routes()
        routes[1][0], routes[1][1] = routes[1][1], routes[1][0]
        self.refused(routes, r"workers \(0, 1\) of one stage run different ops: F0\.0, F1\.0")

    def test_ops_that_wait_in_a_circle(self) -> None:
        # Each stage would compute first what needs the other one's result.
        both = [
            [[PlannedOp("F", 0, 0), PlannedOp("B", 0, 0), PlannedOp("F", 0, 1), PlannedOp("B", 0, 1)],
             [PlannedOp("F", 1, 1), PlannedOp("B", 1, 1), PlannedOp("F", 1, 0), PlannedOp("B", 1, 0)]],
        ]  # fmt: skip
        self.refused(all_routes(self.plan, both, False, 8), r"op B0\.0 waits for an op that waits for it")
