# SPDX-License-Identifier: Apache-2.0
"""Runs a plan's own order of ops with Megatron's forward and backward steps, in place of Megatron's schedule.

Losses are divided by the global batch's micro-batches and gradients are summed, so that each sample weighs the same
wherever it was run (DESIGN contract 2). May import megatron, `plan`, `pipeline`, `executor` and this package.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_resihp.executor.interpreter import run
from megatron_resihp.executor.routes import Step, routes_for
from megatron_resihp.integration.ops.measured_exchange import MeasuredExchange
from megatron_resihp.integration.ops.micro_batches import MicroBatches
from megatron_resihp.integration.ops.split_backward import WeightGradient, leaving_weights, remembering_bias
from megatron_resihp.integration.patches import documents
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.world.heterogeneous import Heterogeneous
from megatron_resihp.integration.world.heterogeneous_groups import as_stage
from megatron_resihp.pipeline.orders import orders_of
from megatron_resihp.plan import ParallelPlan, PlannedOp, Replica, Schedule
from megatron_resihp.plan.schedule import EXPLICIT


def run_training(
    runtime: Runtime, heterogeneous: Heterogeneous, forward_step_func: Any, data_iterator: Any, model: Any, total: int
) -> list[dict[str, Any]]:
    """One iteration's ops on this worker; gradients are left in Megatron's buffers, unsummed.

    Args:
        total: micro-batches of the global batch.

    Returns:
        what the loss function reported of each micro-batch that this worker ran through the head.
    """
    assert runtime.routes is not None and runtime.exchange is not None
    work = MegatronWork(runtime, heterogeneous, runtime.routes, forward_step_func, data_iterator, model, total)
    with ExitStack() as stack:
        for chunk in model:
            stack.enter_context(chunk.no_sync())
        run(runtime.routes, work, runtime.exchange)
    check_gradients(model)
    work.batches.finish()
    runtime.tokens = work.tokens if runtime.tp_rank == 0 else 0.0
    runtime.seen_documents = work.documents if runtime.tp_rank == 0 else None
    return work.reported


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


def run_evaluation(
    runtime: Runtime, heterogeneous: Heterogeneous, forward_step_func: Any, data_iterator: Any, model: Any, total: int
) -> list[dict[str, Any]]:
    """Run `total` micro-batches forwards through the replica whose results are printed; others have none."""
    args = runtime.args
    assert runtime.exchange is not None
    if not heterogeneous.evaluates:
        return []
    evaluating = _evaluating(heterogeneous.evaluating, total)
    alone = ParallelPlan((evaluating,), {})
    orders = [[[op for op in order if op.kind == "F"] for order in orders_of(evaluating)]]
    rows, row = boundary_of(args, args.eval_micro_batch_size)
    steps = routes_for(alone, orders, heterogeneous.worker, runtime.own.sequence_parallel, rows)
    work = MegatronWork(runtime, heterogeneous, steps, forward_step_func, data_iterator, model, total)
    runtime.exchange.connect(steps)
    with runtime.exchange.carrying(row):
        run(steps, work, runtime.exchange)
    work.batches.finish()
    return work.reported


def _evaluating(replica: Replica, total: int) -> Replica:
    """A replica that runs micro-batches 0, …, total − 1, one after the other, through all its chunks."""
    orders = []
    for stage in range(len(replica.stages)):
        own = [chunk for chunk, home in enumerate(replica.stage_of_chunk) if home == stage]
        forwards = [PlannedOp("F", chunk, micro_batch) for micro_batch in range(total) for chunk in own]
        orders.append((*forwards, *(op._replace(kind="B") for op in reversed(forwards))))
    return replace(replica, micro_batches=tuple(range(total)), schedule=Schedule(EXPLICIT, orders=tuple(orders)))


class MegatronWork:
    """What the interpreter asks for, done by Megatron."""

    def __init__(
        self, runtime: Runtime, heterogeneous: Heterogeneous, steps: Sequence[Step], forward_step_func: Any,
        data_iterator: Any, model: Any, total: int,
    ) -> None:  # fmt: skip
        self._runtime = runtime
        self._own = heterogeneous.own_chunks
        self._count = len(heterogeneous.chunks)
        self._models = dict(zip(heterogeneous.own_chunks, model, strict=True))
        self._config = get_model_config(model[0])
        self._forward_step_func = forward_step_func
        self._total = total
        self._kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._splits = any(step.op.kind == "W" for step in steps)
        self._left: dict[tuple[int, int], list[WeightGradient]] = {}
        forwards = [step.op.micro_batch for step in steps if step.op.kind == "F"]
        self.batches = MicroBatches(data_iterator, list(dict.fromkeys(forwards)), Counter(forwards))
        self.reported: list[dict[str, Any]] = []
        self.tokens: Any = 0.0
        self.documents: torch.Tensor | None = None

    def forward(self, chunk: int, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        last = chunk == self._count - 1
        self._runtime.running_chunk = self._own.index(chunk)
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
        with as_stage(chunk, self._count), leaving_weights(self._splits) as left:
            found: torch.Tensor | None = schedules.backward_step(given, output, gradient, self._config)
        self._left[chunk, micro_batch] = left
        return found

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        with self._runtime.probes.weight_gradient(self._own.index(chunk), micro_batch, self._runtime.pad_op):
            for later in self._left.pop((chunk, micro_batch)):
                later.compute()


def boundary_of(args: Any, micro_batch_size: int) -> tuple[int, tuple[int, int]]:
    """What crosses between layers: rows, the tokens of a sample, and the shape of each, (micro-batch, hidden).

    Packed samples of a micro-batch are one long sample.
    """
    if args.dataloader_inter_document_masking:
        return args.seq_length * micro_batch_size, (1, args.hidden_size)
    return args.seq_length, (micro_batch_size, args.hidden_size)


def training_routes(runtime: Runtime, heterogeneous: Heterogeneous) -> tuple[Step, ...]:
    """This worker's steps of every iteration under the plan."""
    orders = [orders_of(replica) for replica in heterogeneous.plan.replicas]
    rows, _ = boundary_of(runtime.args, runtime.args.micro_batch_size)
    return routes_for(heterogeneous.plan, orders, heterogeneous.worker, runtime.own.sequence_parallel, rows)


def make_exchange(runtime: Runtime, heterogeneous: Heterogeneous) -> MeasuredExchange:
    """What carries results between workers in this epoch. All of them call it in the world of the plan."""
    args, communicators = runtime.args, runtime.communicators
    _, row = boundary_of(args, args.micro_batch_size)
    rank_of = {worker: rank for rank, worker in enumerate(heterogeneous.rank_order)}
    everybody, peers = dist.group.WORLD, mpu.get_tensor_model_parallel_group()
    if communicators.waiter is not None:
        everybody = communicators.host_group(range(len(rank_of)))
        peers = communicators.host_group([rank_of[peer] for peer in heterogeneous.peers])
    exchange = MeasuredExchange(
        heterogeneous.worker,
        everybody,
        rank_of,
        peers if len(heterogeneous.peers) > 1 else None,
        row,
        args.params_dtype,
        torch.device("cuda", torch.cuda.current_device()),
        communicators.waiter,
    )
    exchange.begin(runtime, heterogeneous.own_chunks)
    exchange.connect(runtime.routes)
    return exchange
