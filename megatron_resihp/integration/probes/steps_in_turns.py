# SPDX-License-Identifier: Apache-2.0
"""Probes of the schedule that overlaps experts' communication (--overlap-moe-expert-parallel-comm).

Megatron runs the forward pass of one micro-batch in turns with the backward pass of an earlier one, layer by layer, in
place of forward_step and backward_step. At the ends of a pipeline's iteration only one of the two is run. Where
messages between stages are overlapped, too, they are waited for and posted inside. May import this package.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from megatron_resihp.detector.input.records import OpKind
from megatron_resihp.integration.probes.op_notes import OpNotes, PadOp
from megatron_resihp.integration.probes.probes import Probes

POSTING = (("post_forward", OpKind.F), ("post_backward", OpKind.B))
WAITING = ("pre_forward", "pre_backward")


def wrap_combined_step(
    probes: Probes, pad_op: Callable[[], PadOp | None], workload: Callable[[], Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """combined_forward_backward_step as ops of the kinds F and B.

    Args:
        pad_op: what makes ops last longer, from now on.
        workload: N and Σ l² of the micro-batch that was run forwards.
    """

    @functools.wraps(original)
    def combined_forward_backward_step(
        forward_step_func: Any, data_iterator: Any, f_model: Any, num_microbatches: int, input_tensor: Any,
        forward_data_store: Any, b_model: Any, b_input_tensor: Any, b_output_tensor: Any, b_output_tensor_grad: Any,
        config: Any, **options: Any,
    ) -> Any:  # fmt: skip
        def run() -> Any:
            return original(
                forward_step_func, data_iterator, f_model, num_microbatches, input_tensor, forward_data_store,
                b_model, b_input_tensor, b_output_tensor, b_output_tensor_grad, config, **options,
            )  # fmt: skip

        if not probes.recording:
            return run()
        ops = probes.ops
        if f_model is not None:
            ops.open_forward(options.get("f_model_chunk_id") or 0, options["current_microbatch"], tensors(input_tensor))
            if b_model is not None:
                ops.open_beside(b_output_tensor, tensors(b_output_tensor_grad))
        else:
            ops.open_backward(b_output_tensor, tensors(b_output_tensor_grad))
        options |= _noting_messages(ops, options)
        output, tokens, gradient = run()
        if f_model is None:
            ops.close_backward(tensors(gradient), pad_op())
            return output, tokens, gradient
        if options.get("post_backward") is None:
            for tensor in tensors(gradient):
                ops.will_send(OpKind.B, tensor)
        made = tensors(output) if options.get("post_forward") is None else []
        ops.close_forward(output, made, workload(), pad_op())
        return output, tokens, gradient

    return combined_forward_backward_step


def _noting_messages(ops: OpNotes, options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """What is called inside for messages between stages, and notes which op these belong to."""

    def waiting(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wait(*positional: Any, **named: Any) -> Any:
            result = call(*positional, **named)
            ops.work_begins()
            return result

        return wait

    def posting(kind: OpKind, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def post(tensor: Any, *positional: Any, **named: Any) -> Any:
            ops.will_send(kind, tensor)
            return call(tensor, *positional, **named)

        return post

    found = {name: waiting(options[name]) for name in WAITING if options.get(name) is not None}
    return found | {name: posting(kind, options[name]) for name, kind in POSTING if options.get(name) is not None}


def tensors(value: Any) -> list[Any]:
    """Those that a schedule passes on, alone or in a list."""
    found: Iterable[Any] = value if isinstance(value, list) else (value,)
    return [tensor for tensor in found if tensor is not None]
