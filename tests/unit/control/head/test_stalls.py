# SPDX-License-Identifier: Apache-2.0
"""Whether training stands still, and for how long, is said while it lasts."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_resihp.control.head.stalls import LEAST_DUE_S, SAVED_WITHIN, StallWatch
from megatron_resihp.events.codec import read_event
from megatron_resihp.events.job import Stall
from megatron_resihp.protocol.notices import SaveOrder, StopTraining

LOOK_S = 0.5
WENT_ON = {"from_epoch": 0, "to_epoch": 1, "resumed_iteration": 10}


class Run:
    """A job of 100 iterations whose time passes in the test only."""

    def __init__(self, **job: Any) -> None:
        self.watch = StallWatch()
        self.now = 1000.0
        self.iteration = 0
        self.told: list[Stall] = []
        self.note("job", train_iters=100, **job)

    def note(self, name: str, **fields: Any) -> None:
        self.told += self.watch.note(read_event({"event": name, "time": self.now, **fields}), self.now)

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(self.now + LOOK_S, end)
            self.told += self.watch.look(self.now)

    def step(self, iterations: int = 1, seconds: float = 0.4) -> None:
        for _ in range(iterations):
            self.wait(seconds)
            self.iteration += 1
            self.note("iteration", iteration=self.iteration)

    @property
    def seconds(self) -> list[float]:
        return [round(event.seconds, 1) for event in self.told]


def test_a_stall_is_said_while_it_lasts_and_when_it_ends() -> None:
    run = Run()
    run.step(20)
    run.step(seconds=26.0)
    run.step(20)
    assert run.seconds == [1.5, 4.5, 13.5, 26.0], "after 3 usual iterations, each time that has tripled, at the end"
    assert [event.over for event in run.told] == [False, False, False, True]
    assert {event.iteration for event in run.told} == {20}
    assert run.told[0].usual_s == pytest.approx(0.4) and run.told[0].meanwhile is None


def test_larger_batches_are_no_stall() -> None:
    """Not the change to a plan for them, nor that iterations take longer from then on."""
    run = Run()
    run.step(20)
    run.wait(0.2)
    run.note("batch_grown", global_batch_size=64, micro_batches=64)
    run.wait(4.0)
    run.note("reconfiguration", number=1, why="global batches of 64 samples", stood_still_s=4.0, **WENT_ON)
    run.step(20, seconds=1.6)
    assert run.told == []
    run.step(seconds=6.0)
    assert run.told[0].usual_s == pytest.approx(1.6)


def test_checkpoints_that_are_not_kept_are_none() -> None:
    """Megatron's --non-persistent-save-interval; they may coincide with those that are kept."""
    run = Run(save_interval=20, non_persistent_save_interval=5)
    for seconds in (20.0, 20.0, 20.0, 25.0):
        run.step(5)
        run.wait(seconds)
    run.step()
    assert run.told == []


def test_the_checkpoint_of_a_job_whose_time_is_up_is_none() -> None:
    run = Run(ends_early=True)
    run.step(19)
    run.wait(0.4)
    run.note("iteration", iteration=20, ends=True)
    run.wait(LEAST_DUE_S - 1.0)
    run.note("run_finished", exit_code=0)
    assert not run.told


def test_iterations_that_vary_are_no_stall() -> None:
    run = Run()
    for seconds in (0.9, 0.5, 1.4, 2.0, 0.7, 1.1, 2.4) * 5:
        run.step(seconds=seconds)
    assert run.told == []


def test_news_that_come_in_bursts_make_iterations_no_shorter() -> None:
    run = Run()
    for _ in range(10):
        run.wait(4.0)
        for _ in range(10):
            run.iteration += 1
            run.note("iteration", iteration=run.iteration, duration_s=0.4)
    assert run.watch.usual_s == pytest.approx(0.4)


def test_before_there_is_a_usual_time_nothing_is_late() -> None:
    run = Run()
    run.wait(300)
    run.step(3, seconds=60)
    assert run.told == []


def test_a_long_stall_goes_on_being_said() -> None:
    run = Run()
    run.step(10)
    run.wait(3600)
    assert 5 < len(run.told) < 15 and run.seconds[-1] > 3000


def test_a_recovery_is_a_stall_only_where_it_takes_long() -> None:
    run = Run()
    run.step(10)
    run.note("epoch_broken", cause="a death")
    run.wait(3.0)
    run.note("recovery", dead=[], **WENT_ON)
    run.step(seconds=1.0)
    assert run.told == []
    run.step(10)
    run.note("epoch_broken", cause="a death")
    run.wait(12.0)
    assert [event.meanwhile for event in run.told] == ["recovery"]


def test_a_change_stands_still_some_iterations_after_it_was_asked_for() -> None:
    run = Run()
    run.step(10)
    run.note("plan_change", number=1, why="by hand", from_digest="0", to_digest="1", changes=[])
    run.step(3)
    run.wait(3.0)
    run.note("reconfiguration", number=1, why="by hand", stood_still_s=3.0, **WENT_ON)
    run.step(seconds=1.0)
    assert run.told == []
    run.step(10)
    run.step(seconds=3.0)
    assert [event.meanwhile for event in run.told] == [None, None], "the change is over"


def test_evaluations_and_checkpoints_take_their_time() -> None:
    run = Run(eval_interval=10, save_interval=25)
    for _ in range(9):
        run.step(10)
        run.wait(14.0)
    assert run.told == []
    run.step(5)
    run.step(seconds=26.0)
    assert run.seconds[-1] == pytest.approx(26.0), "what is due at other times is no excuse"
    run = Run(eval_interval=10)
    run.step(10)
    run.wait(40.0)
    assert [event.meanwhile for event in run.told] == ["evaluation"]


def test_a_checkpoint_that_was_asked_for_takes_its_time() -> None:
    """It is written after the next iteration, or the one after that."""
    run = Run()
    run.step(10)
    run.watch.told(SaveOrder(1))
    run.step(2)
    run.wait(25.0)
    run.note("checkpoint", iteration=12, path="there")
    run.step(10)
    assert run.told == []
    run.step(seconds=3.0)
    assert [event.meanwhile for event in run.told] == [None, None], "it is over"


def test_a_checkpoint_that_takes_too_long_is_named_and_never_awaited_for_good() -> None:
    run = Run()
    run.step(10)
    run.watch.told(SaveOrder(1))
    run.step(1)
    run.wait(35.0)
    assert [event.meanwhile for event in run.told] == ["checkpoint"]
    run.step(SAVED_WITHIN + 1)
    run.step(seconds=3.0)
    assert run.told[-1].meanwhile is None, "the job writes none"


def test_a_job_that_was_told_to_stop_saves_before_it_ends() -> None:
    run = Run()
    run.step(10)
    run.watch.told(StopTraining(15))
    run.step(1)
    run.wait(25.0)
    run.note("checkpoint", iteration=11, path="there")
    run.wait(10.0)
    assert [event.meanwhile for event in run.told] == ["checkpoint"]


def test_nothing_is_late_after_the_last_iteration_or_the_end() -> None:
    run = Run()
    run.step(100)
    run.wait(60)
    run = Run()
    run.step(10)
    run.note("run_finished", exit_code=0)
    run.wait(60)
    assert run.told == []


def test_a_watch_that_was_stopped_itself_blames_nobody() -> None:
    run = Run()
    run.step(10)
    run.now += 60.0
    run.wait(0.5)
    run.step(10)
    assert run.told == []
