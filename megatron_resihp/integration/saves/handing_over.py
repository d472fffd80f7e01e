# SPDX-License-Identifier: Apache-2.0
"""Patch: what a trainer hands to its checkpoint writer, which keeps none of the trainer's tensors once it has copies.

Megatron's writer keeps them until it has written. One that is killed on the way would leave them allocated on the
device for as long as the trainer lives. Replaces checkpointing.schedule_async_save. Imports the standard library only.
"""

import functools
from collections.abc import Callable
from typing import Any


def wrap_schedule_async_save(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Schedule requests whose tensors are let go of when they have been copied."""

    @functools.wraps(original)
    def schedule_async_save(async_request: Any) -> None:
        original(handed_over(async_request))

    return schedule_async_save


def handed_over(request: Any) -> Any:
    """The same request, with the tensors in one place only: where the function that copies them takes them from.

    Megatron calls that function first, and passes what it returns as the second argument of the one that writes.
    """
    copy = request.preload_fn
    if not (isinstance(copy, functools.partial) and copy.args and copy.args[0] is request.async_fn_args[1]):
        return request
    first, buckets, *others = request.async_fn_args
    taking = functools.partial(copy_once, [buckets], copy.func, copy.args[1:], copy.keywords)
    return request._replace(async_fn_args=[first, None, *others], preload_fn=taking)


def copy_once(place: list[Any], copy: Callable[..., Any], others: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Copy what is in this place, and empty it."""
    return copy(place.pop(), *others, **options)
