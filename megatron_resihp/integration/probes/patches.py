# SPDX-License-Identifier: Apache-2.0
"""Patches: where the probes look. Forward and backward steps, collectives inside them, P2P, and what else takes time.

Replaces forward_step and backward_step of megatron.core.pipeline_parallel.schedules, which all of Megatron's schedules
call, and what calls both at once where experts' communication is overlapped; the functions that post P2P; and
torch.distributed's collectives, of which those among the members of a stage are timed. Megatron's own schedules run
both halves of a backward pass as one op, so that no W is recorded.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_resihp.detector.input.records import OpKind, SpanKind
from megatron_resihp.integration.patch import Patch
from megatron_resihp.integration.patches import documents
from megatron_resihp.integration.probes.probes import Probes
from megatron_resihp.integration.probes.steps_in_turns import tensors, wrap_combined_step
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.plan.parallel_plan import shared_with, sharing_of

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
COMBINED = "megatron.core.pipeline_parallel.combined_1f1b"
P2P = "megatron.core.pipeline_parallel.p2p_communication"
COLLECTIVES = (
    "torch.distributed:all_reduce",
    "torch.distributed:all_gather",
    "torch.distributed:all_gather_into_tensor",
    "torch.distributed:reduce_scatter",
    "torch.distributed:reduce_scatter_tensor",
    "torch.distributed:all_to_all_single",
    # Megatron has bound these names at import.
    "megatron.core.tensor_parallel.mappings:dist_all_gather_func",
    "megatron.core.tensor_parallel.mappings:dist_reduce_scatter_func",
    "megatron.core.tensor_parallel.layers:dist_all_gather_func",
    "megatron.core.tensor_parallel.layers:dist_reduce_scatter_func",
)
SLOTS = (
    ("tensor_send_prev", OpKind.B, False),
    ("tensor_recv_prev", OpKind.F, True),
    ("tensor_send_next", OpKind.F, False),
    ("tensor_recv_next", OpKind.B, True),
)
"""The transfers of one call, in the order in which Megatron posts them in a batch."""


INDICES = (torch.int32, torch.int64)
"""What a micro-batch's tensors say of places in others. NCCL ends an aborted broadcast without its result, and what was
in memory before is no place: work that is queued behind it would fault, and this worker's device be lost."""


def probe_patches(runtime: Runtime) -> list[Patch]:
    """All patches of the probes."""
    partial = functools.partial
    ops = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next", "group")
    return [
        Patch(
            f"{SCHEDULES}:forward_step",
            partial(wrap_forward_step, runtime),
            ("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor"),
            "times forward ops",
        ),
        Patch(
            f"{SCHEDULES}:backward_step",
            partial(wrap_backward_step, runtime),
            ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
            "times backward ops",
        ),
        Patch(
            f"{COMBINED}:combined_forward_backward_step",
            partial(wrap_combined, runtime),
            (
                "forward_step_func",
                "data_iterator",
                "f_model",
                "num_microbatches",
                "input_tensor",
                "forward_data_store",
                "b_model",
                "b_input_tensor",
                "b_output_tensor",
                "b_output_tensor_grad",
                "config",
            ),
            "times ops that are run in turns",
        ),
        Patch(f"{P2P}:_batched_p2p_ops", partial(wrap_p2p_ops, runtime), ops, "times transfers"),
        Patch(f"{P2P}:_p2p_ops", partial(wrap_p2p_ops, runtime), ops, "times transfers"),
        *(Patch(target, partial(wrap_collective, runtime), None, "times waiting") for target in COLLECTIVES),
        Patch("torch.distributed:broadcast", partial(wrap_broadcast, runtime), ("tensor",), "sees batches come"),
        Patch(
            "megatron.training.training:finalize_model_grads",
            partial(wrap_span, runtime, SpanKind.GRADIENT_SYNC),
            ("model", "num_tokens"),
            "times gradient sync",
        ),
    ]


# ---- iterations


def begin_iteration(runtime: Runtime) -> None:
    """Called where an iteration that will be computed begins."""
    view, ops = runtime.view, runtime.probes.ops
    group, ops.tells_waits = mpu.get_tensor_model_parallel_group(), sharing_of(view.plan) == 1
    if ops.tp_group is not group:
        ops.tp_group, ops.stage_groups = group, stage_groups(group)
    runtime.probes.begin(runtime.epoch, runtime.progress.iteration, view.op_numbers, view.rank_order)


def stage_groups(tp_group: Any) -> tuple[Any, ...]:
    """The groups in which members of a tensor-parallel group wait for none but each other.

    Megatron's experts have groups of their own, also where these have the same members. Its routers sum over those that
    share sequences, too.
    """
    others = (
        mpu.get_expert_tensor_parallel_group(),
        mpu.get_expert_tensor_and_model_parallel_group(),
        mpu.get_expert_model_parallel_group(),
        mpu.get_tensor_and_context_parallel_group(),
    )
    members = set(dist.get_process_group_ranks(tp_group))
    return tp_group, *(each for each in others if members.issuperset(dist.get_process_group_ranks(each)))


def wrap_span(runtime: Runtime, kind: SpanKind, original: Callable[..., Any]) -> Callable[..., Any]:
    """Note how long a call takes on the device."""

    @functools.wraps(original)
    def timed(*positional: Any, **options: Any) -> Any:
        with runtime.probes.marked_span(kind):
            return original(*positional, **options)

    return timed


# ---- ops


def wrap_forward_step(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """forward_step as an op of kind F."""
    probes = runtime.probes

    @functools.wraps(original)
    def forward_step(
        forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, input_tensor: Any,
        *positional: Any, **options: Any,
    ) -> Any:  # fmt: skip
        # Where no collective fails for a long time, this worker would be given up before it reports.
        runtime.control.heard.check()
        if not probes.recording:
            return original(
                forward_step_func, data_iterator, model, num_microbatches, input_tensor, *positional, **options
            )
        before = documents.seen_so_far()
        chunk = options.get("vp_stage") or probes.ops.running_chunk
        probes.ops.open_forward(chunk, options["current_microbatch"], tensors(input_tensor))
        result = original(
            forward_step_func, data_iterator, model, num_microbatches, input_tensor, *positional, **options
        )
        probes.ops.close_forward(result[0], tensors(result[0]), _workload(runtime, before), runtime.pads.pad_op)
        return result

    return forward_step


def wrap_backward_step(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """backward_step as an op of kind B."""
    probes = runtime.probes

    @functools.wraps(original)
    def backward_step(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any) -> Any:
        if not probes.recording:
            return original(input_tensor, output_tensor, output_tensor_grad, config)
        probes.ops.open_backward(output_tensor, tensors(output_tensor_grad))
        result = original(input_tensor, output_tensor, output_tensor_grad, config)
        probes.ops.close_backward(tensors(result), runtime.pads.pad_op)
        return result

    return backward_step


def wrap_combined(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """combined_forward_backward_step as ops of both kinds. Where replicas share experts, no documents are packed."""
    return wrap_combined_step(runtime.probes, lambda: runtime.pads.pad_op, lambda: _workload(runtime, None), original)


# ---- workload


def _workload(runtime: Runtime, before: torch.Tensor | None) -> Any:
    """N and Σ l² of the micro-batch just run: numbers, or a tensor where reading it would wait for the device."""
    found = documents.seen_since(before)
    args = runtime.job.args
    if found is not None:
        return tuple(found.tolist()) if runtime.probes.immediate else found
    if documents.are_packed(args) or args.sft:
        return None  # this stage's forward step does not say
    # Of its tokens this worker has a part, which attend to all of the sequence.
    tokens = args.micro_batch_size * args.seq_length / len(shared_with(runtime.view.plan, runtime.view.replica))
    return tokens, tokens * args.seq_length


# ---- collectives


def wrap_collective(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """A collective whose waiting is timed where it is among the members of a stage, and inside an op."""
    probes = runtime.probes

    @functools.wraps(original)
    def collective(*positional: Any, **options: Any) -> Any:
        if options.get("group") not in probes.ops.timed_groups:
            return original(*positional, **options)
        if options.get("async_op"):
            return _TimedHandle(original(*positional, **options), probes)
        since = probes.mark()
        result = original(*positional, **options)
        probes.ops.note_wait(since)
        return result

    return collective


def wrap_broadcast(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """Inside a forward op, a tensor-parallel group broadcasts nothing but its micro-batch: what is work comes after."""
    probes = runtime.probes

    @functools.wraps(original)
    def broadcast(tensor: Any, *positional: Any, **options: Any) -> Any:
        among_members = probes.ops.tp_group is not None and options.get("group") is probes.ops.tp_group
        source = positional[0] if positional else options.get("src")
        if among_members and tensor.dtype in INDICES and source not in (None, dist.get_rank()):
            tensor.zero_()
        result = original(tensor, *positional, **options)
        if among_members and probes.ops.in_op:
            probes.ops.batch_came()
        return result

    return broadcast


class _TimedHandle:
    """Stands for the handle of a collective under way."""

    def __init__(self, handle: Any, probes: Probes) -> None:
        self._handle = handle
        self._probes = probes

    def wait(self, *positional: Any) -> Any:
        since = self._probes.mark()
        result = self._handle.wait(*positional)
        self._probes.ops.note_wait(since)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


# ---- P2P


def wrap_p2p_ops(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """Post P2P, and note when each transfer is done."""
    probes = runtime.probes

    @functools.wraps(original)
    def p2p_ops(**call: Any) -> Any:
        if not probes.recording:
            return original(**call)
        posted = probes.mark()
        requests = original(**call)
        previous, following = call["prev_pipeline_rank"], call["next_pipeline_rank"]
        rows = {}
        for (name, kind, received), rank in zip(SLOTS, (previous, previous, following, following), strict=True):
            tensor = call[name]
            if tensor is not None:
                rows[name] = probes.transfers.post(tensor, rank, kind, received, posted)
        return _follow(runtime, requests, rows)

    return p2p_ops


def _follow(runtime: Runtime, requests: Any, rows: dict[str, list[Any]]) -> Any:
    if isinstance(requests, dict):
        return {name: _TimedRequest(request, runtime, (rows[f"tensor_{name}"],)) for name, request in requests.items()}
    if len(requests) == len(rows):
        return [_TimedRequest(request, runtime, (row,)) for request, row in zip(requests, rows.values(), strict=True)]
    # NCCL gives one request for all that were posted together.
    return [_TimedRequest(request, runtime, tuple(rows.values())) for request in requests]


class _TimedRequest:
    """Stands for a P2P request; notes when it was found to be done."""

    def __init__(self, request: Any, runtime: Runtime, rows: tuple[list[Any], ...]) -> None:
        self._request = request
        self._runtime = runtime
        self._rows = rows
        self._ops_before = runtime.probes.transfers.ops_run

    def wait(self, *positional: Any) -> Any:
        transfers = self._runtime.probes.transfers
        began = time.monotonic() if transfers.ops_run > self._ops_before else None
        result = self._request.wait(*positional)
        rows, self._rows = self._rows, ()
        transfers.done(rows, self._runtime.pads.pad_transfer, began)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
