# SPDX-License-Identifier: Apache-2.0
"""Runs a plan's own order of ops with Megatron's forward and backward steps, in place of Megatron's schedule.

Losses are divided by the global batch's micro-batches and gradients are summed, so that each sample weighs the same
wherever it was run (DESIGN contract 2). May import megatron, `plan`, `pipeline`, `executor` and this package.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_resihp.executor.carriers import Carrier, DirectCarrier, HostCarrier
from megatron_resihp.executor.direct.order import in_agreed_order
from megatron_resihp.executor.direct.peers import Peers
from megatron_resihp.executor.groups.communicators import Communicators
from megatron_resihp.executor.interpreter import run
from megatron_resihp.executor.routes import Orders, Step, all_routes, routes_for
from megatron_resihp.integration.job import type_between_layers
from megatron_resihp.integration.ops.final_gradients import FinalGradients
from megatron_resihp.integration.ops.measured_exchange import MeasuredExchange, Stamps
from megatron_resihp.integration.ops.micro_batches import MicroBatches
from megatron_resihp.integration.ops.split_backward import WeightGradient, leaving_weights, remembering_bias
from megatron_resihp.integration.patches import documents
from megatron_resihp.integration.probes.op_notes import PadOp
from megatron_resihp.integration.probes.probes import Probes
from megatron_resihp.integration.world.heterogeneous import HeterogeneousView
from megatron_resihp.integration.world.heterogeneous_groups import as_stage
from megatron_resihp.pipeline.orders import orders_of
from megatron_resihp.plan import ParallelPlan, PlannedOp, Replica, Schedule
from megatron_resihp.plan.schedule import EXPLICIT

EVALUATED_TOGETHER: Final = 8
"""So many micro-batches may be under way between two stages in an evaluation."""

Row = tuple[int, int]


class ScheduleCall(NamedTuple):
    """What Megatron calls a schedule with.

    Attributes:
        model: this worker's chunks.
        count: micro-batches of the global batch.
    """

    forward_step_func: Any
    data_iterator: Any
    model: Any
    count: int


def run_training(work: "MegatronWork", steps: Sequence[Step], exchange: MeasuredExchange, model: Any) -> None:
    """One iteration's ops on this worker; gradients are left in Megatron's buffers."""
    with ExitStack() as stack:
        for chunk in model:
            stack.enter_context(chunk.no_sync())
        run(steps, work, exchange)
    work.batches.finish()


def check_gradients(model: Sequence[Any]) -> None:
    """Megatron's own check of each bucket, which its DDP makes where it begins to communicate, as it never does here.

    Raises:
        RuntimeError: a gradient is no finite number, and Megatron is not to run the iteration again to find out why.
    """
    for chunk in model:
        settings = chunk.ddp_config
        if settings.check_for_nan_in_grad or settings.check_for_large_grads:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.check_grads(settings.check_for_nan_in_grad, settings.check_for_large_grads)


def is_checked(model: Sequence[Any]) -> bool:
    """Whether Megatron checks gradients."""
    settings = [chunk.ddp_config for chunk in model]
    return any(each.check_for_nan_in_grad or each.check_for_large_grads for each in settings)


def check_norms(model: Sequence[Any], norms: Sequence[torch.Tensor]) -> None:
    """`check_gradients` by the norms of all of a worker's gradients, where some of these are sums by now."""
    settings = model[0].ddp_config
    bucket = SimpleNamespace(grad_data=torch.stack([norm.float() for norm in norms]))
    _ParamAndGradBucketGroup.check_grads(
        SimpleNamespace(buckets=[bucket]), settings.check_for_nan_in_grad, settings.check_for_large_grads
    )


def run_evaluation(work: "MegatronWork", steps: Sequence[Step], exchange: MeasuredExchange, row: Row) -> None:
    """Run an evaluation's steps. `row`: shape of a row of what crosses between layers."""
    exchange.connect(steps)
    place = {number: place for place, number in enumerate(dict.fromkeys(step.op.micro_batch for step in steps))}
    with exchange.carrying(row):
        # Nothing comes back that would show that a result has been received. So some are waited for now and then, or
        # all of them would stay in memory.
        for _, part in groupby(steps, lambda step: place[step.op.micro_batch] // EVALUATED_TOGETHER):
            run(list(part), work, exchange)
    work.batches.finish()


def evaluation_routes(
    view: HeterogeneousView, count: int, sequence_parallel: bool, rows: int, direct: bool
) -> tuple[Step, ...]:
    """This worker's steps of an evaluation of `count` micro-batches; none if it has no part in it."""
    evaluating = tuple(map(_one_after_the_other, view.evaluation(count)))
    orders = [[[op for op in order if op.kind == "F"] for order in orders_of(replica)] for replica in evaluating]
    return _routes(ParallelPlan(evaluating, {}), orders, view.worker, sequence_parallel, rows, direct)


def _one_after_the_other(replica: Replica) -> Replica:
    """A replica that runs each of its micro-batches through all its chunks before the next one."""
    orders = []
    for stage in range(len(replica.stages)):
        own = [chunk for chunk, home in enumerate(replica.stage_of_chunk) if home == stage]
        forwards = [PlannedOp("F", chunk, micro_batch) for micro_batch in replica.micro_batches for chunk in own]
        orders.append((*forwards, *(op._replace(kind="B") for op in reversed(forwards))))
    return replace(replica, schedule=Schedule(EXPLICIT, orders=tuple(orders)))


class MegatronWork:
    """What the interpreter asks for, done by Megatron.

    Attributes:
        reported: what the loss function reported of each micro-batch that this worker ran through the head.
        tokens: that the losses were summed over.
        documents: Σ l and Σ l² of the packed documents in this worker's micro-batches; None: there are none.
    """

    def __init__(
        self, view: HeterogeneousView, steps: Sequence[Step], call: ScheduleCall, probes: Probes,
        pad_op: Callable[[], PadOp | None], final: FinalGradients | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            pad_op: what makes an op last longer, from now on; None: nothing does.
            final: is to be told of backward ops.
        """
        self._probes, self._pad_op, self._final = probes, pad_op, final
        self._own = view.own_chunks
        self._count = len(view.chunks)
        self._models = dict(zip(view.own_chunks, call.model, strict=True))
        self._config = get_model_config(call.model[0])
        self._forward_step_func = call.forward_step_func
        self._total = call.count
        self._kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._splits = any(step.op.kind == "W" for step in steps)
        self._left: dict[tuple[int, int], list[WeightGradient]] = {}
        forwards = [step.op.micro_batch for step in steps if step.op.kind == "F"]
        self.batches = MicroBatches(call.data_iterator, list(dict.fromkeys(forwards)), Counter(forwards))
        self.reported: list[dict[str, Any]] = []
        self.tokens: Any = 0.0
        self.documents: torch.Tensor | None = None

    def forward(self, chunk: int, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        last = chunk == self._count - 1
        self._probes.ops.running_chunk = self._own.index(chunk)
        seen = documents.seen_so_far()
        with as_stage(chunk, self._count), remembering_bias(self._splits):
            output, tokens = schedules.forward_step(
                self._forward_step_func, self.batches.iterator(micro_batch), self._models[chunk], self._total,
                given, self.reported, self._config, cp_group_size=1, current_microbatch=micro_batch,
                is_last_stage=last,
            )  # fmt: skip
        self.tokens = self.tokens + tokens
        if chunk == 0:  # every chunk sees those of its micro-batches
            self._count_documents(seen)
        if not torch.is_grad_enabled():
            return None if last else output
        self._kept[chunk, micro_batch] = given, output
        if last:
            return None
        result: torch.Tensor = output.detach()
        schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)
        return result

    def _count_documents(self, before: torch.Tensor | None) -> None:
        seen = documents.seen_since(before)
        if seen is not None:
            self.documents = seen if self.documents is None else self.documents + seen

    def backward(self, chunk: int, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        given, output = self._kept.pop((chunk, micro_batch))
        watching = self._watching(PlannedOp("B", chunk, micro_batch))
        with as_stage(chunk, self._count), leaving_weights(self._splits) as left, watching:
            found: torch.Tensor | None = schedules.backward_step(given, output, gradient, self._config)
        self._left[chunk, micro_batch] = left
        return found

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        watching = self._watching(PlannedOp("W", chunk, micro_batch))
        with self._probes.weight_gradient(self._own.index(chunk), micro_batch, self._pad_op()), watching:
            for later in self._left.pop((chunk, micro_batch)):
                later.compute()

    def _watching(self, op: PlannedOp) -> AbstractContextManager[None]:
        return nullcontext() if self._final is None else self._final.watching(op)


def boundary_of(args: Any, micro_batch_size: int) -> tuple[int, Row]:
    """What crosses between layers: rows, the tokens of a sample, and the shape of each, (micro-batch, hidden).

    Packed samples of a micro-batch are one long sample.
    """
    if documents.are_packed(args):
        return args.seq_length * micro_batch_size, (1, args.hidden_size)
    return args.seq_length, (micro_batch_size, args.hidden_size)


def training_routes(view: HeterogeneousView, sequence_parallel: bool, rows: int, direct: bool) -> tuple[Step, ...]:
    """This worker's steps of every iteration under the plan.

    Args:
        rows: tokens of a sample.
        direct: whether results cross between devices, in the one order of all workers.
    """
    orders = [orders_of(replica) for replica in view.plan.replicas]
    return _routes(view.plan, orders, view.worker, sequence_parallel, rows, direct)


def _routes(
    plan: ParallelPlan, orders: Orders, worker: int, sequence_parallel: bool, rows: int, direct: bool
) -> tuple[Step, ...]:
    if not direct:
        return routes_for(plan, orders, worker, sequence_parallel, rows)
    return in_agreed_order(all_routes(plan, orders, sequence_parallel, rows)).get(worker, ())


def make_exchange(
    args: Any, communicators: Communicators, view: HeterogeneousView, direct: Peers | None
) -> tuple[MeasuredExchange, Stamps]:
    """What carries results between workers in this epoch. All of them call it in the world of the plan.

    Args:
        direct: carries them between devices; None: they go through the host.

    Returns:
        it, and a group for moments of sending.
    """
    _, row = boundary_of(args, args.micro_batch_size)
    rank_of = {worker: rank for rank, worker in enumerate(view.rank_order)}
    everybody = dist.group.WORLD
    stage = on_host = mpu.get_tensor_model_parallel_group()
    if communicators.host_waiter is not None:
        everybody = communicators.host_group(range(len(rank_of)))
        on_host = communicators.host_group([rank_of[peer] for peer in view.peers])
    device = torch.device("cuda", torch.cuda.current_device())
    alone = len(view.peers) == 1
    carrier: Carrier
    if direct is not None:
        carrier = DirectCarrier(direct, None if alone else stage)
    else:
        carrier = HostCarrier(
            view.worker, everybody, rank_of, None if alone else on_host, device, communicators.host_waiter
        )
    return MeasuredExchange(view.worker, carrier, row, type_between_layers(args)), (everybody, rank_of)
