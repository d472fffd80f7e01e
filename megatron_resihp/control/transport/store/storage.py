# SPDX-License-Identifier: Apache-2.0
"""What the store holds, and who waits for what. Pure: requests and the time go in, replies come out.

May import: the standard library and `control.transport.store.wire`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from functools import partial
from itertools import count
from typing import Final

from megatron_resihp.control.transport.store.wire import SIZE, Op, Reply, Request, Said, write_values

YES: Final = Reply(Said.YES)
NO: Final = Reply(Said.NO)
MOST_TAKEN_BYTES: Final = 1 << 20
"""Of an answer with values of a queue, unless the first is larger."""
Told = list[tuple[Hashable, Reply]]
"""Replies, each with who asked."""


class Storage:
    """Values, counters and queues. A queue and a value of the same name have nothing to do with each other."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._queues: defaultdict[bytes, deque[bytes]] = defaultdict(deque)
        self._pushed: dict[bytes, None] = {}
        """Queues that `give_out` looks at."""
        self._waiting: dict[Hashable, Request] = {}
        self._waiters: dict[tuple[bool, bytes], dict[Hashable, None]] = {}
        self._deadlines: list[tuple[float, int, Hashable, Request]] = []
        self._numbers = count()
        self._do: dict[Op, Callable[..., Reply]] = {
            Op.SET: self._set, Op.CHECK: self._check, Op.COMPARE_SET: self._compare_set, Op.ADD: self._add,
            Op.PUSH: self._push, Op.DELETE: self._delete, Op.DELETE_ALL: partial(_delete_all, self._values),
            Op.COUNT: lambda: Reply(Said.YES, str(len(self._values)).encode()), Op.REACH: lambda: YES,
        }  # fmt: skip

    def ask(self, asker: Hashable, request: Request, now: float) -> Told:
        """Do what is asked for. Whoever waits is told later, by `ask`, `give_out` or `expire`, and asks nothing
        meanwhile."""
        if request.op in self._do:
            reply = self._do[request.op](*request.fields)
            return [(asker, reply), *(told for key in _written(request) for told in self._wake(False, key))]
        found = self._find(request)
        if found is not None or request.within_s <= 0.0:
            return [(asker, found or NO)]
        self._waiting[asker] = request
        self._waiters.setdefault(_place(request), {})[asker] = None
        heapq.heappush(self._deadlines, (now + request.within_s, next(self._numbers), asker, request))
        return []

    def give_out(self) -> Told:
        """What was pushed since the last call, for whoever waits for it. Where much is pushed at once, the coordinator
        is to get it at once: an answer for each message would take longer than the messages."""
        queues, self._pushed = self._pushed, {}
        return [told for queue in queues for told in self._wake(True, queue)]

    def expire(self, now: float) -> Told:
        """Who has waited in vain."""
        told: Told = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, asker, request = heapq.heappop(self._deadlines)
            if self._waiting.get(asker) is request:
                self.forget(asker)
                told.append((asker, NO))
        return told

    @property
    def next_deadline(self) -> float | None:
        """When to call `expire`, at the latest."""
        return self._deadlines[0][0] if self._deadlines else None

    def waits(self, asker: Hashable) -> bool:
        return asker in self._waiting

    def forget(self, asker: Hashable) -> None:
        """Whoever it is waits no more."""
        request = self._waiting.pop(asker, None)
        if request is not None:
            waiters = self._waiters[_place(request)]
            del waiters[asker]
            if not waiters:
                del self._waiters[_place(request)]
            self._drop_old_deadlines()

    def _drop_old_deadlines(self) -> None:
        """Waits that ended early leave theirs behind, which may be a day away."""
        if len(self._deadlines) > 2 * len(self._waiting) + 1000:
            self._deadlines = [each for each in self._deadlines if self._waiting.get(each[2]) is each[3]]
            heapq.heapify(self._deadlines)

    def _find(self, request: Request) -> Reply | None:
        key = request.fields[0]
        if request.op is Op.TAKE:
            return self._take(key)
        if key not in self._values:
            return None
        return Reply(Said.YES, self._values[key]) if request.op is Op.GET else YES

    def _take(self, key: bytes) -> Reply | None:
        """What a queue holds, as far as it fits into an answer."""
        queue = self._queues.get(key)
        if not queue:
            return None
        answer = write_values([queue.popleft()])
        rest: list[bytes] = []
        left = MOST_TAKEN_BYTES - len(answer)
        while queue and len(queue[0]) + SIZE.size <= left:
            left -= len(queue[0]) + SIZE.size
            rest.append(queue.popleft())
        if not queue:
            del self._queues[key]
        return Reply(Said.YES, answer + write_values(rest))

    def _wake(self, is_queue: bool, name: bytes) -> Told:
        told: Told = []
        for asker in list(self._waiters.get((is_queue, name), ())):
            found = self._find(self._waiting[asker])
            if found is None:
                break
            self.forget(asker)
            told.append((asker, found))
        return told

    def _set(self, *fields: bytes) -> Reply:
        self._values.update(zip(fields[::2], fields[1::2], strict=True))
        return YES

    def _check(self, *keys: bytes) -> Reply:
        return YES if all(key in self._values for key in keys) else NO

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> Reply:
        stored = self._values.get(key)
        if (stored or b"") == expected:
            self._values[key] = stored = desired
        return NO if stored is None else Reply(Said.YES, stored)

    def _add(self, key: bytes, amount: bytes) -> Reply:
        try:
            total = str(int(self._values.get(key, b"0")) + int(amount))
        except ValueError:
            return Reply(Said.WRONG, b"it holds no number, or one that is too long")
        self._values[key] = total.encode()
        return Reply(Said.YES, self._values[key])

    def _push(self, queue: bytes, value: bytes) -> Reply:
        self._queues[queue].append(value)
        self._pushed[queue] = None
        return YES

    def _delete(self, key: bytes) -> Reply:
        return NO if self._values.pop(key, None) is None else YES


def _place(request: Request) -> tuple[bool, bytes]:
    return request.op is Op.TAKE, request.fields[0]


def _written(request: Request) -> tuple[bytes, ...]:
    """Keys that a request gives values."""
    if request.op is Op.SET:
        return request.fields[::2]
    return request.fields[:1] if request.op in (Op.COMPARE_SET, Op.ADD) else ()


def _delete_all(values: dict[bytes, bytes], beginning: bytes) -> Reply:
    for key in [key for key in values if key.startswith(beginning)]:
        del values[key]
    return YES
