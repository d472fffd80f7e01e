"""A change of plan that this worker has heard of: its groups are made by a thread while training goes on.

Other workers must not be left waiting in groups that this one does not have. So each tells the coordinator once its
groups are there, and counts as having heard of the change only then or when that has failed; the plan that is
published says whether all had them. May import megatron and this room.
"""

import sys
import threading
from typing import Any

from megatron_resihp.control.worker import NO_EPOCH, EpochPlan
from megatron_resihp.executor.groups_ahead import GroupsAhead
from megatron_resihp.integration.group_needs import needs_of
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.plan import ParallelPlan


class Preparation:
    """The groups that a worker has made, or is making, for a change."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._number = 0
        self._groups: GroupsAhead | None = None
        self._thread: threading.Thread | None = None

    def begin(self, order: dict[str, Any]) -> None:
        """Called in the thread that hears of a change, which has other news to hear. `order`: the notice."""
        if self._runtime.epoch not in (order["epoch"], NO_EPOCH):
            return
        self._give_up()  # a newcomer may have been asked for before
        self._number = order["number"]
        self._thread = threading.Thread(target=self._make, args=(order,), name="resihp-preparing", daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Whether there is nothing to wait for: groups have been made, or can't be."""
        return self._thread is None or not self._thread.is_alive()

    def take(self, order: EpochPlan) -> GroupsAhead | None:
        """The groups for a plan that has been published, if all its members have theirs; others are given up."""
        if order.groups_of_change != self._number:
            self._give_up()
            return None
        groups, self._groups = self._groups, None
        return groups

    def _give_up(self) -> None:
        if self._thread is not None:
            self._thread.join()
        groups, self._groups, self._thread = self._groups, None, None
        if groups is not None:
            self._runtime.communicators.discard(groups)

    def _make(self, order: dict[str, Any]) -> None:
        runtime, number = self._runtime, order["number"]
        try:
            plan = ParallelPlan.from_dict(order["plan"])
            if runtime.worker not in plan.members:
                return
            self._groups = runtime.communicators.groups_ahead(number, plan.digest)
            self._groups.make(needs_of(runtime, plan))
        except Exception as error:  # nothing depends on it: the groups are made when the change comes
            if not runtime.control.broken():
                why = f"{type(error).__name__}: {error}"
                print(f"resihp: worker {runtime.worker} can't make groups ahead ({why})", file=sys.stderr, flush=True)
            return
        runtime.control.tell("prepared", number=number)
