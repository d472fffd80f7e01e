# SPDX-License-Identifier: Apache-2.0
"""What many askers of one node want to know of the store, over one line. Pure: requests, answers and the time go in.

Waits of several for the same key cross the network once, as one wait without an end. When an asker's time is over, the
store is asked whether it is there: with that answer it has said all that came in time, and only then is the asker told
that nothing came. So a store that is stopped answers late, and says nothing wrong. A wait that nobody waits for any
more stays open for a while, for whoever asks again. Whoever joins a wait may be told what was there a moment before: as
long as an answer is on its way.

Reports of survivors go together. While the store owes the answer to one of them, others wait for it, and are told as
one then. Where the store is idle that is a moment. In large jobs the first one waits, too, for a moment or until all
workers of the node have reported. May import: `protocol`, and `wire`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Final

from megatron_resihp.control import keys
from megatron_resihp.control.transport.store.wire import (
    LONGEST_WAIT_S,
    MalformedRequestError,
    Op,
    Reply,
    Request,
    Said,
    dropped,
    relayed,
)
from megatron_resihp.protocol.together import Together, may_be_together

NO: Final = Reply(Said.NO)
SHARED: Final = (Op.GET, Op.WAIT)
GRID_S: Final = 0.05
"""Waits end at multiples of this time, many at once."""
IDLE_S: Final = 15.0
"""How long a wait stays open that nobody waits for: longer than processes of a job pause between two looks."""
MOST_IDLE: Final = 256

GATHERED_FROM: Final = 64
"""Nodes of a job in which reports are gathered. In a smaller one node 0 reads them as fast as they come."""
GATHER_S: Final = 0.005

Told = list[tuple[Hashable, Reply]]
"""Answers, each with who asked."""
_INBOX: Final = keys.INBOX.encode()


@dataclass
class Gathering:
    """How reports of a node are gathered.

    Attributes:
        together: joins them.
        within_s: how long the first one waits for others.
        workers: how many the node has now; when all have reported none waits.
    """

    together: Together
    within_s: float = 0.0
    workers: int = 0


@dataclass
class _Open:
    request: Request
    askers: dict[Hashable, None] = field(default_factory=dict)

    @property
    def place(self) -> tuple[Op, bytes] | None:
        """Of a wait that is shared."""
        request = self.request
        return (request.op, request.fields[0]) if request.op in SHARED and request.within_s > 0.0 else None


def gathering_s(nodes: int) -> float:
    """How long the first report of a node waits for others in a job of so many nodes."""
    return GATHER_S if nodes >= GATHERED_FROM else 0.0


class Questions:
    """Of one line. Each asker asks one question at a time, and is answered once, unless the line is lost.

    What methods return as requests is to be sent over the line, in this order.

    Args:
        gathering: the caller keeps it up to date.
    """

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self._report = -1
        """Under which number the store was last told a report."""
        self._waiting: dict[Hashable, Request] = {}
        """Reports that are to be told when it has answered that, or when they are gathered."""
        self._gathered_by = math.inf
        self._numbers = count()
        self._open: dict[int, _Open] = {}
        self._number_of: dict[Hashable, int] = {}
        self._shared: dict[tuple[Op, bytes], int] = {}
        self._idle: dict[int, float] = {}
        """Shared waits that nobody waits for, and since when."""
        self._reach = -1
        """Under which number it was last asked whether the store can be reached."""
        self._prompt: dict[int, float] = {}
        """What the store answers at once, and since when it is open."""
        self._until: dict[Hashable, float] = {}
        self._deadlines: list[tuple[float, int, Hashable]] = []
        self._late: dict[Hashable, float] = {}
        self._probe: tuple[int, dict[Hashable, float]] | None = None
        """Under which number it is asked whether the store is there, and for whom."""

    def asks(self, asker: Hashable) -> bool:
        """Whether a question of this asker is open."""
        return asker in self._number_of or asker in self._waiting

    def ask(self, asker: Hashable, request: Request, now: float) -> list[Request]:
        """Take a question.

        Raises:
            MalformedRequestError: the asker's last one is open.
        """
        if self.asks(asker):
            raise MalformedRequestError("a question before the last one was answered")
        if request.op in SHARED and request.within_s > 0.0:
            return self._share(asker, request, now)
        if request.op is Op.REACH and self._reach in self._open:
            self._add(asker, self._reach, self._open[self._reach])
            return []
        is_report = _is_report(request)
        if is_report and self._report in self._open:
            self._waiting[asker] = request
            return []
        if is_report and self._gathering.within_s > 0.0:
            return self._gather(asker, request, now)
        number = next(self._numbers)
        self._add(asker, number, _Open(request))
        if is_report:
            self._report = number
        if request.op is Op.REACH:
            self._reach = number
        if request.op is not Op.TAKE or request.within_s <= 0.0:
            self._prompt[number] = now
        return [relayed(number, request)]

    def hear(self, number: int, reply: Reply, now: float) -> tuple[Told, list[Request]]:
        """Take an answer; nobody may wait for it any more."""
        self._prompt.pop(number, None)
        if self._probe is not None and self._probe[0] == number:
            expired = [asker for asker, until in self._probe[1].items() if self._until.get(asker) == until]
            self._probe = None
            for asker in expired:
                self._remove(asker, now)
            return [(asker, NO) for asker in expired], self._probe_for_the_late(now)
        found = self._open.pop(number, None)
        if found is None:
            return [], []
        self._idle.pop(number, None)
        if found.place is not None:
            del self._shared[found.place]
            if reply.said is Said.NO:
                return [], self._ask_again(found)
        for asker in found.askers:
            self._forget(asker)
        requests = self._tell_reports(now) if number == self._report and self._waiting else []
        return [(asker, reply) for asker in found.askers], requests

    def forget(self, asker: Hashable, now: float) -> list[Request]:
        """Whoever it is awaits no answer any more. A report of that one that has not been sent is not sent."""
        self._waiting.pop(asker, None)
        number = self._number_of.get(asker)
        if number is None:
            return []
        self._remove(asker, now)
        found = self._open[number]
        if found.askers or number in self._prompt or found.place is not None:
            return self._drop_idle(now)
        del self._open[number]
        return [dropped(number)]

    def expire(self, now: float) -> list[Request]:
        """Whose time is over is told as soon as the store has shown that it is there."""
        while self._deadlines and self._deadlines[0][0] <= now:
            until, _, asker = heapq.heappop(self._deadlines)
            if self._until.get(asker) == until:
                self._late[asker] = until
        gathered = self._tell_reports(now) if self._gathered_by <= now else []
        return gathered + self._probe_for_the_late(now) + self._drop_idle(now)

    @property
    def next_deadline(self) -> float | None:
        """When to call `expire`, at the latest."""
        oldest = [since + IDLE_S for since in islice(self._idle.values(), 1)]
        first = min((*oldest, *(until for until, _, _ in self._deadlines[:1]), self._gathered_by))
        return None if math.isinf(first) else first

    @property
    def unanswered_since(self) -> float | None:
        """Since when the store owes the oldest answer that it could have given at once; None: it owes none."""
        return next(iter(self._prompt.values()), None)

    def _gather(self, asker: Hashable, request: Request, now: float) -> list[Request]:
        self._waiting[asker] = request
        self._gathered_by = min(self._gathered_by, now + self._gathering.within_s)
        return self._tell_reports(now) if len(self._waiting) >= self._gathering.workers else []

    def _tell_reports(self, now: float) -> list[Request]:
        """Tell all reports that wait."""
        waiting, self._waiting = self._waiting, {}
        self._gathered_by = math.inf
        askers, sent = list(waiting), list[Request]()
        for places, text in self._gathering.together.told([request.fields[1] for request in waiting.values()]):
            number = self._report = next(self._numbers)
            question = _Open(Request(Op.PUSH, (_INBOX, text)))
            for place in places:
                self._add(askers[place], number, question)
            self._prompt[number] = now
            sent.append(relayed(number, question.request))
        return sent

    def _share(self, asker: Hashable, request: Request, now: float) -> list[Request]:
        sent: list[Request] = []
        place = (request.op, request.fields[0])
        number = self._shared.get(place)
        if number is None:
            found = _Open(replace(request, within_s=LONGEST_WAIT_S))
            number = self._shared[place] = next(self._numbers)
            sent.append(relayed(number, found.request))
        else:
            found = self._open[number]
            self._idle.pop(number, None)
        self._add(asker, number, found)
        until = math.ceil((now + min(request.within_s, LONGEST_WAIT_S)) / GRID_S) * GRID_S
        self._until[asker] = until
        heapq.heappush(self._deadlines, (until, next(self._numbers), asker))
        return sent

    def _ask_again(self, wait: _Open) -> list[Request]:
        """The store has ended a wait: whoever waits for longer asks again."""
        assert wait.place is not None
        if not wait.askers:
            return []
        number = self._shared[wait.place] = next(self._numbers)
        self._open[number] = wait
        for asker in wait.askers:
            self._number_of[asker] = number
        return [relayed(number, wait.request)]

    def _probe_for_the_late(self, now: float) -> list[Request]:
        if self._probe is not None or not self._late:
            return []
        number = next(self._numbers)
        self._probe, self._late = (number, self._late), {}
        self._prompt[number] = now
        return [relayed(number, Request(Op.REACH))]

    def _drop_idle(self, now: float) -> list[Request]:
        old = [number for number, since in self._idle.items() if now - since >= IDLE_S]
        old += list(self._idle)[len(old) : max(len(self._idle) - MOST_IDLE, 0)]
        for number in old:
            place = self._open.pop(number).place
            assert place is not None
            del self._idle[number], self._shared[place]
        return [dropped(number) for number in old]

    def _add(self, asker: Hashable, number: int, question: _Open) -> None:
        self._open[number] = question
        question.askers[asker] = None
        self._number_of[asker] = number

    def _remove(self, asker: Hashable, now: float) -> None:
        """From a question that stays open."""
        number = self._number_of[asker]
        found = self._open[number]
        del found.askers[asker]
        self._forget(asker)
        if not found.askers and found.place is not None:
            self._idle[number] = now

    def _forget(self, asker: Hashable) -> None:
        del self._number_of[asker]
        self._late.pop(asker, None)
        if self._until.pop(asker, None) is not None and len(self._deadlines) > 2 * len(self._until) + 1000:
            self._deadlines = [each for each in self._deadlines if self._until.get(each[2]) == each[0]]
            heapq.heapify(self._deadlines)


def _is_report(request: Request) -> bool:
    return request.op is Op.PUSH and request.fields[0] == _INBOX and may_be_together(request.fields[1])
