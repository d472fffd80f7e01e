# SPDX-License-Identifier: Apache-2.0
"""A checkpoint writer gets the tensors once, and lets go of them when it has copies."""

from __future__ import annotations

import gc
import pickle
import weakref
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_resihp.integration.saves.handing_over import handed_over, wrap_schedule_async_save

WRITTEN: list[Any] = []


def write(rank: int, buckets: Any, results: Any) -> None:
    WRITTEN.append((rank, buckets, results))


def copied(buckets: list[Any], doubled: bool) -> list[Any]:
    return [tensor.clone() * (2 if doubled else 1) for tensor in buckets]


def request(buckets: list[Any]) -> AsyncRequest:
    return AsyncRequest(write, [3, buckets, "results"], [], preload_fn=partial(copied, buckets, True))


def run(received: AsyncRequest) -> None:
    """As Megatron's writer does."""
    arguments = list(received.async_fn_args)
    assert received.preload_fn is not None and received.async_fn is not None
    arguments[1] = received.preload_fn()
    received.async_fn(*arguments)


def test_what_is_written_is_the_copy() -> None:
    WRITTEN.clear()
    run(pickle.loads(pickle.dumps(handed_over(request([torch.ones(2)])))))
    [(rank, buckets, results)] = WRITTEN
    assert (rank, results) == (3, "results") and torch.equal(buckets[0], torch.full((2,), 2.0))


def test_nothing_holds_the_tensors_once_they_are_copied() -> None:
    tensor = torch.ones(2)
    received, gone = handed_over(request([tensor])), weakref.ref(tensor)
    del tensor
    assert gone() is not None
    received.preload_fn()
    gc.collect()
    assert gone() is None


def test_a_request_of_another_shape_stays_as_it_is() -> None:
    for other in (AsyncRequest(None, (), []), AsyncRequest(write, [3, [], "results"], [], preload_fn=lambda: [])):
        assert handed_over(other) is other


def test_megatrons_own_requests_have_this_shape() -> None:
    writer = object.__new__(FileSystemWriterAsync)
    writer.write_buckets = [("path", "key", ([], []))]
    writer.results_queue, writer.use_msc = None, False
    found = []
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        function, preload, arguments = writer.get_save_function_and_args()
    finally:
        torch.distributed.destroy_process_group()
    wrap_schedule_async_save(found.append)(AsyncRequest(function, arguments, [], preload_fn=preload))
    assert found[0].async_fn_args[1] is None
