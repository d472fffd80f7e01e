# SPDX-License-Identifier: Apache-2.0
"""`torch.distributed` over gloo for a program that asks for NCCL. May import torch."""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d


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
        ("barrier", _barrier),
        ("all_reduce", functools.partial(_averaging, 0)),
        ("reduce_scatter_tensor", functools.partial(_averaging, 1)),
    ):
        replacement = wrap(getattr(distributed_c10d, name))
        setattr(distributed_c10d, name, replacement)
        setattr(torch.distributed, name, replacement)
