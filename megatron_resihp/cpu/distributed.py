# SPDX-License-Identifier: Apache-2.0
"""`torch.distributed` over gloo for a program that asks for NCCL. May import torch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.functional import pad


def _init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *arguments: Any, **options: Any) -> None:
        if backend is None or "nccl" in backend:
            backend = "gloo"
            options.pop("pg_options", None)
        options.pop("device_id", None)
        original(backend, *arguments, **options)

    return init_process_group


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group(
        ranks: list[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        if backend is None or "nccl" in backend:
            backend, pg_options = None, None
        options.pop("device_id", None)
        return original(ranks, timeout, backend, pg_options, *arguments, **options)

    return new_group


def _all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron has split sizes as arrays, which gloo's binding does not take."""

    def numbers(sizes: Any) -> list[int] | None:
        return None if sizes is None else [int(size) for size in sizes]

    @functools.wraps(original)
    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        return original(output, input, numbers(output_split_sizes), numbers(input_split_sizes), *arguments, **options)

    return all_to_all_single


class _Gathering:
    """An all-gather of equal parts under way, from which unequal ones are cut."""

    def __init__(self, work: Any, outputs: Sequence[Tensor], padded: Sequence[Tensor]) -> None:
        self._work = work
        self._outputs = outputs
        self._padded = padded

    def wait(self, *arguments: Any) -> bool:
        done = self._work is None or self._work.wait(*arguments)
        with torch.no_grad():
            for output, whole in zip(self._outputs, self._padded, strict=True):
                output.view(-1).copy_(whole[: output.numel()])
        return bool(done)

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """NCCL gathers parts of unequal sizes, gloo does not: they are padded to the largest one."""

    @functools.wraps(original)
    def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        longest = max(each.numel() for each in tensor_list)
        if all(each.numel() == longest for each in tensor_list):
            return original(tensor_list, tensor, group, async_op)
        padded = [tensor.new_zeros(longest) for _ in tensor_list]
        own = tensor.new_zeros(longest)
        own[: tensor.numel()] = tensor.detach().reshape(-1)
        gathering = _Gathering(original(padded, own, group, async_op), tensor_list, padded)
        if async_op:
            return gathering
        gathering.wait()
        return None

    return all_gather


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for sums of parts of unequal sizes, which Megatron never leaves under way."""

    @functools.wraps(original)
    def reduce_scatter(output: Tensor, input_list: Sequence[Tensor], *arguments: Any, **options: Any) -> Any:
        longest = max(each.numel() for each in input_list)
        if all(each.numel() == longest for each in input_list):
            return original(output, input_list, *arguments, **options)
        padded = [pad(each.detach().reshape(-1), (0, longest - each.numel())) for each in input_list]
        own = output.new_empty(longest)
        original(own, padded, *arguments, **options)
        with torch.no_grad():
            output.view(-1).copy_(own[: output.numel()])
        return None

    return reduce_scatter


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    """Drop the device that Megatron passes, because gloo refuses it."""

    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
        return original(group, async_op)

    return barrier


def _averaging(input_at: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Divide what goes into a mean and sum that, as NCCL does: gloo has no means.

    Args:
        input_at: the place of the tensor that goes in; it is divided in place.
    """

    @functools.wraps(original)
    def reduction(*positional: Any, **options: Any) -> Any:
        if options.get("op") == torch.distributed.ReduceOp.AVG:
            positional[input_at].div_(torch.distributed.get_world_size(options.get("group")))
            options["op"] = torch.distributed.ReduceOp.SUM
        return original(*positional, **options)

    return reduction


def install() -> None:
    # torch's own helpers call these through the inner module, users through the outer one.
    for name, wrap in (
        ("init_process_group", _init_process_group),
        ("new_group", _new_group),
        ("all_gather", _all_gather),
        ("all_to_all_single", _all_to_all_single),
        ("reduce_scatter", _reduce_scatter),
        ("barrier", _barrier),
        ("all_reduce", functools.partial(_averaging, 0)),
        ("reduce_scatter_tensor", functools.partial(_averaging, 1)),
    ):
        replacement = wrap(getattr(distributed_c10d, name))
        setattr(distributed_c10d, name, replacement)
        setattr(torch.distributed, name, replacement)
