# SPDX-License-Identifier: Apache-2.0
"""Slowness that comes and goes: changes of plan for it must not cost a job more than they bring."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from made_up_events import made_up

from megatron_resihp.control.replanning.by_choice.patience import MOST_LOST_S, Patience, Shift
from megatron_resihp.control.replanning.by_choice.policy import Action, AskPlanner, Policy, Recommend, Settings
from megatron_resihp.control.replanning.health import Speeds
from megatron_resihp.events.detection import Verdict
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.protocol.planning import PlanFound

EVEN = ParallelPlan((Replica(((0,), (2,)), (0, 2)), Replica(((1,), (3,)), (1, 3))))
SPARING = ParallelPlan((Replica(((0,), (2,)), (0, 1, 2)), Replica(((1,), (3,)), (3,))))
"""Worker 3 has less to do."""


@dataclass(frozen=True)
class Seconds:
    """Of an iteration under the even plan and under the sparing one, with worker 3 well and slow; and of a change."""

    well: float
    slow: float
    spared_well: float
    spared_slow: float
    change: float


@dataclass
class Job:
    """A job whose worker 3 is slow now and then. The detector knows some iterations later.

    Attributes:
        taken_s: since the start.
        doing_nothing_s: without any change.
        changes: so far.
    """

    seconds: Seconds
    iteration: int = 0
    taken_s: float = 0.0
    doing_nothing_s: float = 0.0
    changes: int = 0
    plan: ParallelPlan = EVEN
    speeds: Speeds = field(default_factory=Speeds)

    def __post_init__(self) -> None:
        self.policy = Policy(Settings(act="act"), self.speeds)
        self._tell(made_up("job", train_iters=10**6))
        self._tell(made_up("epoch_started", plan=EVEN.to_dict(), epoch=0))

    def train(self, iterations: int, slow: bool, known_after: int) -> None:
        """Worker 3 is slow, or well, for so many iterations; known after some."""
        each = self.seconds
        for done in range(1, iterations + 1):
            self.iteration += 1
            of_even = each.slow if slow else each.well
            of_sparing = each.spared_slow if slow else each.spared_well
            taken_s = of_even if self.plan == EVEN else of_sparing
            self.taken_s += taken_s
            self.doing_nothing_s += of_even
            self._tell(made_up("iteration", iteration=self.iteration, duration_s=taken_s))
            if done == known_after:
                self.tell_speed(3, "onset" if slow else "recovery", self.iteration - known_after + 1)

    def tell_speed(self, worker: int, change: str, since: int) -> None:
        """A verdict."""
        told = made_up("verdict", kind="compute", change=change, workers=[worker], speed=0.5, since=since)
        assert isinstance(told, Verdict)
        self.speeds.note(told)
        self._tell(told)

    def come_and_go(self, times: int, slow: int, well: int) -> None:
        """So many spells."""
        for _ in range(times):
            self.train(slow, slow=True, known_after=4)
            self.train(well, slow=False, known_after=2)

    def _tell(self, event: object) -> None:
        for action in self.policy.note(event, self.taken_s):  # type: ignore[arg-type]
            self._do(action)

    def _do(self, action: Action) -> None:
        if isinstance(action, AskPlanner):
            for each in self.policy.answered(action.number, self._answer(), self.taken_s):
                self._do(each)
        elif isinstance(action, Recommend):
            self.changes += 1
            self._tell(made_up("plan_change", number=self.changes, why=action.why))
            self.taken_s += self.seconds.change
            self.plan = action.plan
            self._tell(made_up("epoch_started", plan=self.plan.to_dict(), epoch=self.changes))
            told = {"number": self.changes, "why": action.why, "stood_still_s": self.seconds.change}
            self._tell(made_up("reconfiguration", **told))

    def _answer(self) -> PlanFound:
        each = self.seconds
        slow = (3,) in self.speeds.slow(range(4))
        even, sparing = (each.slow, each.spared_slow) if slow else (each.well, each.spared_well)
        best, best_s = (SPARING, sparing) if sparing < even else (EVEN, even)
        current_s = even if self.plan == EVEN else sparing
        return PlanFound(best, 0.1, best_s, current_s, each.well, each.change, 0.0, bound_s=best_s)


@pytest.mark.parametrize(
    ("seconds", "slow", "well"),
    [
        (Seconds(2.0, 3.0, spared_well=2.5, spared_slow=2.2, change=20.0), 40, 160),
        (Seconds(10.0, 20.0, spared_well=13.0, spared_slow=12.0, change=20.0), 10, 40),
        (Seconds(10.0, 11.0, spared_well=10.5, spared_slow=10.2, change=8.0), 8, 42),
        (Seconds(1.0, 2.0, spared_well=1.78, spared_slow=1.79, change=20.0), 20, 10),
    ],
    ids=["long spells", "deep spells", "spells that alone lose too little", "the plan for them saves too little"],
)
def test_spells_cost_hardly_more_than_to_do_nothing(seconds: Seconds, slow: int, well: int) -> None:
    job = Job(seconds)
    job.train(200, slow=False, known_after=0)
    job.come_and_go(10_000 // (slow + well), slow, well)
    assert job.taken_s < 1.01 * job.doing_nothing_s


def test_nor_beside_a_slow_worker_that_no_plan_helps() -> None:
    job = Job(Seconds(2.0, 3.0, spared_well=2.5, spared_slow=2.2, change=20.0))
    job.train(200, slow=False, known_after=0)
    job.tell_speed(1, "onset", since=190)
    job.come_and_go(50, slow=40, well=160)
    assert job.taken_s < 1.01 * job.doing_nothing_s


def test_spells_for_which_a_change_pays_are_answered_each_time() -> None:
    job = Job(Seconds(10.0, 20.0, spared_well=13.0, spared_slow=12.0, change=30.0))
    job.train(200, slow=False, known_after=0)
    job.come_and_go(10, slow=100, well=900)
    assert job.changes == 20 and job.taken_s < job.doing_nothing_s


def test_what_lasts_after_many_spells_is_answered_once_it_has_lost_twice_as_much_as_they() -> None:
    seconds = Seconds(2.0, 3.0, spared_well=2.5, spared_slow=2.2, change=20.0)
    job = Job(seconds)
    job.come_and_go(20, slow=40, well=160)
    assert job.plan == EVEN
    of_a_spell = 40 * (seconds.slow - seconds.spared_slow)
    job.train(round(2 * of_a_spell / (seconds.slow - seconds.spared_slow)) + 1, slow=True, known_after=4)
    assert job.plan == SPARING


SPELL, OTHER = Shift(slower=frozenset({(3,)})), Shift(slower=frozenset({(5,)}))
BACK = Shift(faster=frozenset({(3,)}))


def in_vain(patience: Patience, now: float, times: int = 1) -> None:
    """A change for worker 3, that cost ten seconds and saved none, and one back."""
    for _ in range(times):
        patience.changed(SPELL, 1.0, 10.0, iteration=100, now=now)
        patience.heard((3,), since=101, slow=False)
        patience.changed(BACK, 1.0, 10.0, iteration=110, now=now)


def test_others_are_answered_as_ever() -> None:
    patience = Patience()
    in_vain(patience, 0.0)
    both = Shift(slower=SPELL.slower | OTHER.slower)
    needed = [patience.to_lose_s(shift, 10.0, 0.0) for shift in (SPELL, OTHER, both, BACK, Shift())]
    assert needed == [20.0, 10.0, 10.0, 10.0, 10.0]


def test_a_slow_link_is_waited_for_like_a_worker() -> None:
    patience, link = Patience(), frozenset({(2, 5)})
    patience.changed(Shift(slower=link), 1.0, 10.0, iteration=100, now=0.0)
    patience.heard((2, 5), since=101, slow=False)
    patience.changed(Shift(faster=link), 1.0, 10.0, iteration=110, now=0.0)
    assert patience.to_lose_s(Shift(slower=link), 10.0, 0.0) == 20.0


def test_a_change_that_has_paid_lets_nobody_wait() -> None:
    patience = Patience()
    patience.changed(SPELL, 1.0, 10.0, iteration=100, now=0.0)
    patience.heard((3,), since=131, slow=False)
    patience.changed(BACK, 1.0, 10.0, iteration=140, now=0.0)
    assert patience.to_lose_s(SPELL, 10.0, 0.0) == 10.0, "30 s saved: what it cost there and back, and ten in between"


def test_patience_wears_off() -> None:
    """Two changes of ten seconds, and ten lost in between: ten thousand seconds later that is 0.3 % of the time."""
    patience = Patience()
    in_vain(patience, 0.0)
    assert patience.to_lose_s(SPELL, 10.0, 5_000.0) == pytest.approx(10.0 * 2**0.5)
    assert patience.to_lose_s(SPELL, 10.0, 10_000.0) == 10.0


def test_what_has_lost_an_hour_is_acted_on() -> None:
    patience = Patience()
    in_vain(patience, 0.0, times=30)
    assert patience.to_lose_s(SPELL, 10.0, 0.0) == MOST_LOST_S
    assert patience.to_lose_s(SPELL, 2 * MOST_LOST_S, 0.0) == 2 * MOST_LOST_S, "never less than it costs"


def test_who_has_left_is_forgotten() -> None:
    patience = Patience()
    in_vain(patience, 0.0)
    patience.keep([0, 1, 2])
    assert patience.to_lose_s(SPELL, 10.0, 0.0) == 10.0


def test_plans_of_others_tell_nothing_of_those_before() -> None:
    """Workers died after the change: what is taken back later is not that."""
    patience = Patience()
    patience.changed(SPELL, 1.0, 10.0, iteration=100, now=0.0)
    patience.forget_changes()
    patience.changed(BACK, 1.0, 10.0, iteration=110, now=0.0)
    assert patience.to_lose_s(SPELL, 10.0, 0.0) == 10.0


def test_planners_that_were_wrong_are_believed_less_by_everybody_until_there_are_others() -> None:
    patience = Patience()
    patience.keep(range(6))
    patience.misled(10.0, 0.0)
    patience.keep(range(6))
    assert [patience.to_lose_s(shift, 10.0, 0.0) for shift in (SPELL, OTHER, BACK, Shift())] == [20.0] * 4
    patience.keep(range(5))
    assert patience.to_lose_s(SPELL, 10.0, 0.0) == 10.0


def test_who_only_looks_well_again_and_again_waits_for_work_alone() -> None:
    patience = Patience()
    patience.keep(range(6))
    for times in range(1, 16):
        patience.relapsed((3,), times)
    others = [patience.to_lose_s(shift, 10.0, 0.0) for shift in (SPELL, OTHER, Shift(faster=OTHER.slower))]
    assert patience.to_lose_s(BACK, 10.0, 0.0) == 160.0 and others == [10.0] * 3
    patience.keep([0, 1, 2])
    assert patience.to_lose_s(BACK, 10.0, 0.0) == 10.0
