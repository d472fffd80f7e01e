# SPDX-License-Identifier: Apache-2.0
"""A group's transfers in several directions at once, over real gloo connections within one process."""

import inspect
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_resihp.executor.groups import side_group
from megatron_resihp.executor.groups.side_group import SideGroup
from megatron_resihp.executor.groups.waiting import Waiter

LIMIT_S = 60.0


def run_all(count: int, act: Callable[[SideGroup, int], None]) -> None:
    """What each of a group's workers does, in a thread of its own."""
    store, errors = dist.HashStore(), list[BaseException]()

    def run(me: int) -> None:
        try:
            act(SideGroup(store, "ring", range(count), me, Waiter(lambda: False)), me)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(me,), daemon=True) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a worker waits for ever"
    assert errors == []


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("load", [4, 1 << 20], ids=["element by element", "whole"])
def test_all_pass_tensors_of_unlike_sizes_on_around_a_ring(
    count: int, load: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_group, "LOAD", load)
    # Other tests of this process have installed waiters, each for one worker: here are several.
    monkeypatch.setattr(dist.Work, "wait", inspect.unwrap(dist.Work.wait))
    turns = [*range(0, count - 1, 2), *range(1, count - 1, 2), count - 1]

    def act(group: SideGroup, me: int) -> None:
        before, after = (me - 1) % count, (me + 1) % count
        own, got = torch.arange(1.0 + me), torch.empty(1 + before)
        ways: dict[int, Iterator[side_group.Post]] = {
            me: group.sending(own, after), before: group.receiving(got, before)
        }  # fmt: skip
        group.at_once(*(ways[edge] for edge in turns if edge in ways))
        assert got.tolist() == torch.arange(1.0 + before).tolist()

    run_all(count, act)
