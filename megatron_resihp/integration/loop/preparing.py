# SPDX-License-Identifier: Apache-2.0
"""A change of plan that this worker has heard of: its groups are made by a thread while training goes on.

Other workers must not be left waiting in groups that this one does not have. So each tells the coordinator once its
groups are there, and counts as having heard of the change only then or when that has failed; the plan that is
published says whether all had them. May import megatron and this package.
"""

import sys
import threading
import time
from collections.abc import Callable

from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.control.worker.heard import NO_EPOCH
from megatron_resihp.executor.gloo.groups_ahead import GroupNeeds, GroupsAhead
from megatron_resihp.executor.groups.communicators import Communicators
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.protocol.messages import GroupsPrepared
from megatron_resihp.protocol.notices import PlanChange
from megatron_resihp.protocol.published import EpochPlan

LONGEST_S = 10.0
"""A change does not wait longer for groups that are made ahead of it."""


class Preparation:
    """The groups that a worker has made, or is making, for a change."""

    def __init__(
        self, control: WorkerControl, communicators: Communicators, needs_of: Callable[[ParallelPlan], GroupNeeds]
    ) -> None:
        """`needs_of`: finds out the groups that this worker is in under a plan."""
        self._control, self._communicators, self._needs_of = control, communicators, needs_of
        self._number = 0
        self._groups: GroupsAhead | None = None
        self._thread: threading.Thread | None = None
        self._until = 0.0
        self._lock = threading.Lock()
        """Held because the thread that hears of a change may be late, when the next epoch has begun."""

    def begin(self, change: PlanChange) -> None:
        """Called in the thread that hears of a change, which has other news to hear."""
        with self._lock:
            if self._control.epoch not in (change.epoch, NO_EPOCH):
                return
            self._give_up()  # a joining worker may have been asked for before
            self._number, self._until = change.number, time.monotonic() + LONGEST_S
            thread = threading.Thread(target=self._make, args=(change,), name="resihp-preparing", daemon=True)
            thread.start()
            self._thread = thread

    def is_over(self) -> bool:
        """Whether there is nothing to wait for: groups have been made, or won't be in time."""
        return self._thread is None or not self._thread.is_alive() or time.monotonic() > self._until

    def take(self, order: EpochPlan) -> GroupsAhead | None:
        """The groups for a plan that has been published, if all its members have theirs; others are given up."""
        with self._lock:
            if order.groups_of_change != self._number:
                self._give_up()
                return None
            groups, self._groups = self._groups, None
            return groups

    def _give_up(self) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, self._until - time.monotonic()))
            if self._thread.is_alive():
                return  # it has them in hand
        groups, self._groups, self._thread = self._groups, None, None
        if groups is not None:
            self._communicators.discard(groups)

    def _make(self, change: PlanChange) -> None:
        control, number, plan = self._control, change.number, change.plan
        try:
            if control.worker not in plan.members:
                return
            self._groups = self._communicators.groups_ahead(number, plan.digest)
            self._groups.make(self._needs_of(plan))
        except Exception as error:  # nothing depends on it: the groups are made when the change comes
            if not control.heard.broken():
                why = f"{type(error).__name__}: {error}"
                print(f"resihp: worker {control.worker} can't make groups ahead ({why})", file=sys.stderr, flush=True)
            return
        control.tell(GroupsPrepared(control.worker, number))
