# SPDX-License-Identifier: Apache-2.0
"""Small pipelines without Megatron in processes of their own, run by test_exchange.py: python toy_pipeline.py OUT.

A layer is x + down(gelu(up(x))), cut over tensor-parallel members by rows and columns, as in Megatron. All workers go
through all cases and write down gradients, losses and the bytes that they sent to other stages.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from random_plans import draw_case
from torch import Tensor
from torch.nn.functional import gelu

from megatron_resihp.coding import decode
from megatron_resihp.executor.carriers import Carrier, DirectCarrier, HostCarrier
from megatron_resihp.executor.direct.order import in_agreed_order
from megatron_resihp.executor.direct.peers import GlooPeers, Peers
from megatron_resihp.executor.exchange import PieceExchange
from megatron_resihp.executor.groups.communicators import Communicators
from megatron_resihp.executor.groups.waiting import WaitAbandoned, Waiter
from megatron_resihp.executor.interpreter import run
from megatron_resihp.executor.messages import Message
from megatron_resihp.executor.routes import all_routes
from megatron_resihp.pipeline.planned import explicit_schedule, program_of
from megatron_resihp.plan import Chunk, Migration, ParallelPlan, PlannedOp, Replica, Schedule
from megatron_resihp.plan.layers import chunks_from

WORKERS = 6
MICRO_BATCH, HIDDEN, WIDE = 2, 5, 12
DTYPE = torch.float64
SEEDS = (171, 234, 500, 566, 690)
"""Of random plans for no more workers, in which replicas of several stages help each other out."""
TIMEOUT = timedelta(seconds=30)


class Case(NamedTuple):
    """A plan, whether its members have parts of the tokens each, and how many tokens a micro-batch has."""

    plan: ParallelPlan
    split: bool
    tokens: int


def plans() -> dict[str, ParallelPlan]:
    def one(*stages: tuple[int, ...], schedule: str, layers: tuple[int, ...]) -> ParallelPlan:
        micro_batches = tuple(range(5))
        return ParallelPlan((Replica(stages, micro_batches, chunks_from(layers, len(stages)), Schedule(schedule)),))

    helped = (Chunk(0, 0, 1), Chunk(1, 1, 3))
    return {
        "2 to 1": one((0, 1), (2,), schedule="1f1b", layers=(2, 1)),
        "1 to 2": one((0,), (1, 2), schedule="1f1b", layers=(1, 2)),
        "2 to 4": one((0, 1), (2, 3, 4, 5), schedule="zero-bubble-h1", layers=(2, 2)),
        "3 to 2 to 1": one((0, 1, 2), (3, 4), (5,), schedule="interleaved", layers=(1, 1, 1, 1, 0, 1)),
        "migrated": ParallelPlan(
            (
                Replica(((0, 1), ()), (0, 2), helped, explicit("F0.0 F2.0 B0.0 B2.0", "")),
                Replica(((2,), (3, 4, 5)), (1,), helped, explicit("F1.0 B1.0", "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1")),
            ),
            migrations=(Migration(0, 1, 1), Migration(2, 1, 1)),
        ),
    } | {f"random {seed}": draw_case(Random(seed)).plan for seed in SEEDS}


def explicit(*orders: str) -> Schedule:
    return decode(Schedule, {"name": "explicit", "orders": list(orders)})


def cases() -> dict[str, Case]:
    """Without sequence parallelism tokens are no multiple of anything, so that pieces differ in length."""
    return {
        f"{name}, {'split' if split else 'whole'}": Case(plan, split, 12 if split else 7)
        for name, plan in plans().items()
        for split in (False, True)
    }


def orders_of(plan: ParallelPlan) -> list[tuple[tuple[PlannedOp, ...], ...]]:
    return [
        replica.schedule.orders
        if replica.schedule and replica.schedule.orders
        else explicit_schedule(program_of(replica), replica.micro_batches).orders
        for replica in plan.replicas
    ]


def weights_of(layer: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(layer)
    return tuple(torch.randn(shape, generator=source, dtype=DTYPE) for shape in ((HIDDEN, WIDE), (WIDE, HIDDEN)))  # type: ignore[return-value]


def data_of(micro_batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Input, and what the output is multiplied with to give the loss."""
    source = torch.Generator().manual_seed(1000 + micro_batch)
    values = torch.randn(2, tokens, MICRO_BATCH, HIDDEN, generator=source, dtype=DTYPE)
    return values[0], values[1]


class Members:
    """The tensor-parallel group of a stage, and how a layer's activations change hands in it."""

    def __init__(self, rank: int, degree: int, split: bool, group: Any) -> None:
        self.rank, self.degree, self.split, self.group = rank, degree, split, group

    def part(self, tensor: Tensor, dim: int = 0) -> Tensor:
        length = tensor.shape[dim]
        first, end = (rank * length // self.degree for rank in (self.rank, self.rank + 1))
        return tensor.narrow(dim, first, end - first)

    def sum(self, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        if self.degree > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def whole(self, part: Tensor) -> Tensor:
        if self.degree == 1:
            return part
        whole = part.new_empty(self.degree * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=self.group)
        return whole


class Enter(torch.autograd.Function):
    """Into the part of a layer that is cut: all tokens, and the sum of all members' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, members: Members) -> Tensor:
        ctx.members = members
        return members.whole(tensor) if members.split else tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = ctx.members.sum(gradient)
        return (ctx.members.part(total) if ctx.members.split else total), None


class Leave(torch.autograd.Function):
    """Out of it: the sum of all members' results, of all tokens or of this member's part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, members: Members) -> Tensor:
        ctx.members = members
        total = members.sum(tensor)
        return members.part(total) if members.split else total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return (ctx.members.whole(gradient) if ctx.members.split else gradient.clone()), None


def beside() -> dict[str, Case]:
    """Some of them, to be run beside a world that is as NCCL's."""
    return {f"{name}, beside devices": cases()[name] for name in ("2 to 1, whole", "1 to 2, whole", "1 to 2, split")}


def between_devices() -> dict[str, Case]:
    """Those with most to go wrong, in the one order of the devices' way."""
    kinds = ("3 to 2 to 1", "migrated", f"random {SEEDS[-1]}")
    return {f"{name}, between devices": case for name, case in cases().items() if name.startswith(kinds)}


class ToyWork:
    """The ops of one worker."""

    def __init__(self, chunks: tuple[Chunk, ...], members: Members, tokens: int, splits_backward: bool) -> None:
        self.chunks, self.members, self.tokens, self.splits_backward = chunks, members, tokens, splits_backward
        self.weights: dict[int, list[Tensor]] = {}
        self.gradients: dict[int, list[Tensor]] = {}
        self.losses: dict[int, Tensor] = {}
        self.live: dict[tuple[int, int], list[Any]] = {}
        for layer in range(chunks[-1].end):
            up, down = weights_of(layer)
            self.weights[layer] = [
                members.part(tensor, dim).clone().requires_grad_() for tensor, dim in ((up, 1), (down, 0))
            ]
            self.gradients[layer] = [torch.zeros_like(tensor) for tensor in self.weights[layer]]

    def forward(self, chunk: int, micro_batch: int, received: Tensor | None) -> Tensor | None:
        given, factor = (
            self.members.part(tensor) if self.members.split else tensor for tensor in data_of(micro_batch, self.tokens)
        )
        assert (received is None) == (chunk == 0)
        output = given if received is None else received
        for layer in self.layers(chunk):
            up, down = self.weights[layer]
            output = output + Leave.apply(gelu(Enter.apply(output, self.members) @ up) @ down, self.members)
        if chunk == len(self.chunks) - 1:
            output = (output * factor).sum()
            self.losses[micro_batch] = output.detach()
        self.live[chunk, micro_batch] = [received, output, None]
        return output

    def backward(self, chunk: int, micro_batch: int, received: Tensor | None) -> Tensor | None:
        assert (received is None) == (chunk == len(self.chunks) - 1)
        given, output, _ = self.live[chunk, micro_batch]
        self.live[chunk, micro_batch][2] = received
        gradient = None
        if given is not None:
            (gradient,) = torch.autograd.grad(output, [given], received, retain_graph=True)
        if not self.splits_backward:
            self.weight_gradient(chunk, micro_batch)
        return gradient

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        _, output, received = self.live.pop((chunk, micro_batch))
        of_layers = [(layer, number) for layer in self.layers(chunk) for number in (0, 1)]
        if of_layers:
            found = torch.autograd.grad(output, [self.weights[layer][n] for layer, n in of_layers], received)
            for (layer, number), gradient in zip(of_layers, found, strict=True):
                self.gradients[layer][number] += gradient

    def layers(self, chunk: int) -> range:
        return range(self.chunks[chunk].first, self.chunks[chunk].end)


def run_case(
    case: Case, me: int, world: dist.ProcessGroup | None = None, waiter: Waiter | None = None,
    peers: Peers | None = None,
) -> Mapping[str, Any] | None:  # fmt: skip
    """`world`: of all workers, for host tensors; None: the default group. `waiter` ends its waits. `peers`: of all
    workers, in place of both."""
    plan = case.plan
    groups = {
        members: dist.new_group(members, backend="gloo")
        for replica in plan.replicas
        for members in replica.stages
        if len(members) > 1
    }
    replica = plan.replica_of(me)
    if replica is None:
        return None
    ours = plan.replicas[replica]
    mine = next(members for members in ours.stages if me in members)
    members = Members(mine.index(me), len(mine), case.split, groups.get(mine))
    splits_backward = ours.schedule is not None and ours.schedule.splits_backward
    work = ToyWork(ours.chunks, members, case.tokens, splits_backward)
    routes = all_routes(plan, orders_of(plan), case.split, case.tokens)
    steps = (routes if peers is None else in_agreed_order(routes))[me]
    device = torch.device("cpu")
    carrier: Carrier = DirectCarrier(peers, members.group) if peers is not None else HostCarrier(
        me, world or dist.group.WORLD, {worker: worker for worker in plan.working}, members.group, device, waiter,
    )  # fmt: skip
    exchange = PieceExchange(me, carrier, (MICRO_BATCH, HIDDEN), DTYPE)
    exchange.connect(steps)
    run(steps, work, exchange)
    assert not work.live
    counts = case.split or members.rank == 0
    return {
        "rank": members.rank,
        "degree": members.degree,
        "gradients": work.gradients,
        "losses": work.losses if counts else {},
        "bytes": exchange.bytes_sent,
        "messages": [str(step.target) for step in steps if isinstance(step.target, Message)],
    }


def waits_forever(me: int, broken: threading.Event) -> bool:
    """Whether worker 1 still waits for a message that nobody sends when the epoch is broken."""
    if me != 1:
        return False
    alone, message = {0: 0, 1: 1}, Message(PlannedOp("F", 0, 0), (0,), (1,), 4, False, 0)
    exchange = PieceExchange(me, HostCarrier(me, dist.group.WORLD, alone, None, torch.device("cpu")), (HIDDEN,), DTYPE)
    exchange.take(message)
    broken.set()
    try:
        exchange.receive(message)
    except WaitAbandoned:
        return False
    return True


def beside_a_world_of_devices(me: int, store: dist.Store) -> dict[str, Mapping[str, Any] | None]:
    """The cases of `beside`, where the default group carries no host tensors."""
    communicators = Communicators(dist.PrefixStore("devices", store), me, lambda: False)
    communicators.begin(1, "plan")
    communicators.join_world("cuda:gloo", range(WORKERS), TIMEOUT)
    host = communicators.host_group(range(WORKERS))
    assert communicators.host_waiter is not None
    found = {name: run_case(case, me, host, communicators.host_waiter) for name, case in beside().items()}
    dist.barrier(group=host)
    communicators.destroy()
    communicators.release()
    return found


def work_through(me: int, directory: Path) -> None:
    """All cases as one worker."""
    broken = threading.Event()
    store = dist.FileStore(str(directory / "store"), WORKERS)
    results: dict[str, Any] = beside_a_world_of_devices(me, store)
    Waiter(broken.is_set).install()
    dist.init_process_group("gloo", store=store, rank=me, world_size=WORKERS, timeout=TIMEOUT)
    results |= {name: run_case(case, me) for name, case in cases().items()}
    peers = GlooPeers(store, "peers", range(WORKERS), me, Waiter(broken.is_set))
    results |= {name: run_case(case, me, peers=peers) for name, case in between_devices().items()}
    dist.barrier()
    results["waits forever"] = waits_forever(me, broken)
    # Who leaves before worker 1 is through ends its wait as well.
    store.add("through", 1) if me == 1 else store.wait(["through"])
    torch.save(results, directory / f"{me}.pt")


def main() -> None:
    # Forked before torch has made any thread: importing it six times would take longer than all cases.
    context = multiprocessing.get_context("fork")
    directory = Path(sys.argv[1])
    workers = [context.Process(target=work_through, args=(me, directory), daemon=True) for me in range(WORKERS)]
    for worker in workers:
        worker.start()
    left = {worker.sentinel: worker for worker in workers}
    while left:
        for sentinel in wait(list(left)):
            ended = left.pop(sentinel)
            ended.join()
            if ended.exitcode:
                sys.exit("a worker failed")  # and the others end with this process


if __name__ == "__main__":
    main()
