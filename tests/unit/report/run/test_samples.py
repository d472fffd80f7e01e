# SPDX-License-Identifier: Apache-2.0
"""The count of samples, against a count so slow and obvious that it must be right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resihp.events.codec import read_event
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import Job
from megatron_resihp.events.training import Iteration, Samples
from megatron_resihp.report.run.samples import Feed, count_samples
from megatron_resihp.report.run.summary import summarize

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda r: (r[0], r[0] + r[1])), max_size=4)
feeds = st.lists(st.builds(Feed, st.integers(1, 6), ranges), max_size=10)


@given(feeds, st.integers(0, 4), st.integers(0, 6), st.integers(1, 6))
def test_intervals_are_counted_as_single_samples_are(
    given_feeds: list[Feed], first: int, last: int, batch: int
) -> None:
    applied = [(f.iteration, sample) for f in given_feeds for a, b in f.ranges for sample in range(a, b + 1)]
    times = Counter(sample for _, sample in applied)
    due = range(first * batch, last * batch)
    found = count_samples(given_feeds, first, last, lambda iteration: (iteration - 1) * batch)
    assert found.consumed == len(applied)
    assert found.applied_twice == sum(count - 1 for count in times.values())
    assert found.lost == sum(1 for sample in due if sample not in times)
    assert found.out_of_place == sum(1 for i, sample in applied if not (i - 1) * batch <= sample < i * batch)


class Attempt:
    """One attempt of one iteration: which of its samples were fed, and whether it was agreed and how that is known."""

    def __init__(self, iteration: int, epoch: int, samples: list[int], known_by: str | None) -> None:
        self.iteration, self.epoch, self.samples, self.known_by = iteration, epoch, samples, known_by


@st.composite
def attempts(draw: st.DrawFn) -> tuple[int, list[Attempt]]:
    """A run in which attempts break and are redone; now and then samples go missing or come in twice."""
    batch = draw(st.integers(1, 5))
    made: list[Attempt] = []
    epoch = 0
    for iteration in range(1, draw(st.integers(1, 6)) + 1):
        for _ in range(draw(st.integers(0, 2))):
            made.append(Attempt(iteration, epoch, draw(_fed(iteration, batch)), None))
            epoch += 1
        known_by = draw(st.sampled_from(["iteration", "iteration", "agreed", "late iteration"]))
        made.append(Attempt(iteration, epoch, draw(_fed(iteration, batch)), known_by))
        # After an agreement known only from the coordinator's record the epoch was broken.
        epoch += known_by != "iteration"
    return batch, made


def _fed(iteration: int, batch: int) -> st.SearchStrategy[list[int]]:
    right = list(range((iteration - 1) * batch, iteration * batch))
    return st.one_of(st.just(right), st.lists(st.integers(0, 7 * batch), max_size=2 * batch))


def _events(batch: int, made: list[Attempt]) -> list[Event]:
    events: list[dict[str, Any]] = [{"event": "job", "time": 0.0, "global_batch_size": batch, "train_iters": 9}]
    for attempt in made:
        base = {"time": 0.0, "iteration": attempt.iteration, "epoch": attempt.epoch}
        # Two replicas with a part each.
        for part in (attempt.samples[::2], attempt.samples[1::2]):
            events.append({**base, "event": "samples", "samples": [[sample, sample] for sample in part]})
        if attempt.known_by == "late iteration":
            late = {**base, "epoch": attempt.epoch + 1, "agreed_epoch": attempt.epoch}
            events.append({**late, "event": "iteration"})
        elif attempt.known_by is not None:
            events.append({**base, "event": attempt.known_by})
    return list(map(read_event, events))


@settings(max_examples=300)
@given(attempts())
def test_a_run_of_random_attempts_is_counted_by_what_was_agreed(run: tuple[int, list[Attempt]]) -> None:
    batch, made = run
    summary = summarize(_events(batch, made))
    applied = [sample for attempt in made if attempt.known_by for sample in attempt.samples]
    times = Counter(applied)
    last = max(attempt.iteration for attempt in made)
    assert summary.iterations == last
    assert summary.samples_consumed == len(applied)
    assert summary.samples_applied_twice == sum(count - 1 for count in times.values())
    assert summary.samples_lost == sum(1 for sample in range(last * batch) if sample not in times)


def _step(iteration: int, epoch: int, first: int, last: int, consumed: int | None = None) -> list[Event]:
    return [
        Samples(iteration=iteration, epoch=epoch, samples=((first, last),), consumed=consumed),
        Iteration(iteration=iteration, epoch=epoch),
    ]


JOB = Job(global_batch_size=4, train_iters=2)


def test_a_step_that_was_applied_in_two_epochs_shows() -> None:
    summary = summarize([JOB, *_step(1, 0, 0, 3), *_step(1, 1, 0, 3), *_step(2, 1, 4, 7)])
    assert (summary.samples_applied_twice, summary.samples_lost) == (4, 0)


def test_a_skipped_batch_shows() -> None:
    summary = summarize([JOB, *_step(1, 0, 0, 3), *_step(2, 1, 8, 11)])
    assert (summary.samples_lost, summary.samples_out_of_place) == (4, 4)


def test_samples_swapped_between_iterations_show() -> None:
    summary = summarize([JOB, *_step(1, 0, 4, 7), *_step(2, 0, 0, 3)])
    assert (summary.samples_lost, summary.samples_applied_twice, summary.samples_out_of_place) == (0, 0, 8)


def test_a_job_that_starts_from_a_checkpoint_owes_only_what_comes_after() -> None:
    summary = summarize([JOB, *_step(2, 0, 4, 7)])
    assert (summary.samples_consumed, summary.samples_lost) == (4, 0)


def test_a_checkpoint_of_other_batches_is_gone_on_from() -> None:
    """Forty iterations of 2 samples have been; a sample that is skipped then is lost all the same."""
    right = [*_step(41, 0, 80, 83, consumed=80), *_step(42, 0, 84, 87, consumed=84)]
    summary = summarize([JOB, *right])
    assert (summary.samples_consumed, summary.samples_lost, summary.samples_out_of_place) == (8, 0, 0)
    skipped = _step(41, 0, 84, 87, consumed=80)
    summary = summarize([JOB, *skipped])
    assert (summary.samples_lost, summary.samples_out_of_place) == (4, 4)


def test_batches_grow_from_what_a_checkpoint_had_consumed() -> None:
    grows = replace(JOB, batch_steps=((0, 2), (6, 4)))
    summary = summarize([grows, *_step(6, 0, 5, 6, consumed=5), *_step(7, 0, 7, 10, consumed=7)])
    assert (summary.samples_consumed, summary.samples_lost, summary.samples_out_of_place) == (6, 0, 0)


def test_nothing_is_claimed_about_samples_that_were_not_recorded() -> None:
    summary = summarize([JOB, Iteration(iteration=1)])
    assert (summary.samples_consumed, summary.samples_applied_twice, summary.samples_lost) == (None, None, None)
