# SPDX-License-Identifier: Apache-2.0
"""Where survivors go on from: their records against a plain reading of the contract, "one step per iteration"."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.coding import decode, encode
from megatron_resihp.control.coordination.record import NoCommitError, resolve
from megatron_resihp.protocol.records import Commit, IterationPhase, Outcome, Record


def counters(iteration: int) -> dict[str, int]:
    return {"iteration": iteration - 1, "consumed_train_samples": 16 * (iteration - 1)}


def outcome(iteration: int, named: bool = True) -> Outcome:
    return Outcome(0, 1.5 + iteration, ((64.0, 32.0),), ("lm loss",) if named else ())


def record(iteration: int, stage: IterationPhase, works: bool = True) -> Record:
    """What a worker reports: outcomes of the steps it knows to be agreed, counters of this iteration and the last.

    A standby learns the counters of an iteration together with its outcome.
    """
    known = [n for n in (iteration - 1, iteration) if n > 0 and (n < iteration or stage >= IterationPhase.AGREED)]
    entered = [n for n in (iteration - 1, iteration) if n > 0] if works else known
    return Record(
        iteration, stage, works, {n: outcome(n, named=works) for n in known}, {n: counters(n) for n in entered}
    )


@st.composite
def survivors(draw: st.DrawFn, last: int | None = None) -> list[Record]:
    """Records that can be together: who has agreed on j, so that all are REDUCED there or beyond; or nobody has."""
    j = draw(st.integers(1, 50)) if last is None else last
    reach = [(j, stage) for stage in (IterationPhase.REDUCED, IterationPhase.AGREED, IterationPhase.STEPPED)]
    reach += [(j + 1, stage) for stage in (IterationPhase.COMPUTE, IterationPhase.REDUCED)]
    places = draw(st.lists(st.sampled_from(reach), min_size=1, max_size=5))
    if all(place == (j, IterationPhase.REDUCED) for place in places):
        places.append((j, IterationPhase.AGREED))
    works = draw(st.lists(st.booleans(), min_size=len(places), max_size=len(places)))
    return [record(*place, works=worked) for place, worked in zip(places, works, strict=True)]


class TestWhatCountsAsApplied:
    @pytest.mark.parametrize(
        ("stage", "applied"),
        [
            (IterationPhase.COMPUTE, 6),
            (IterationPhase.REDUCED, 6),
            (IterationPhase.AGREED, 7),
            (IterationPhase.STEPPED, 7),
        ],
    )
    def test_one_survivor(self, stage: IterationPhase, applied: int) -> None:
        """j = i if s >= AGREED, else i - 1."""
        assert record(7, stage).applied == applied
        assert resolve([record(7, stage)]).iteration == applied

    @given(
        places=st.lists(st.tuples(st.integers(1, 9), st.sampled_from(IterationPhase), st.booleans()), min_size=1),
        bound=st.none() | st.integers(0, 9),
    )
    def test_the_largest_over_all_survivors_and_every_earlier_commit(
        self, places: list[tuple[int, IterationPhase, bool]], bound: int | None
    ) -> None:
        records = [record(*place) for place in places]
        # Whoever they are, somebody knows the counters.
        records[0] = replace(records[0], counters={n: counters(n) for n in range(12)})
        expected = 0 if bound is None else bound
        for iteration, stage, _ in places:
            expected = max(
                expected, iteration if stage in (IterationPhase.AGREED, IterationPhase.STEPPED) else iteration - 1
            )
        commit = resolve(records, None if bound is None else Commit(bound, outcome(bound), True, counters(bound)))
        assert commit.iteration == expected

    def test_one_that_agreed_decides_for_all(self) -> None:
        records = [
            record(5, IterationPhase.REDUCED),
            record(5, IterationPhase.AGREED),
            record(5, IterationPhase.REDUCED),
        ]
        commit = resolve(records)
        assert (commit.iteration, commit.outcome, commit.replay) == (5, outcome(5), True)

    def test_without_agreement_the_step_is_nobodys(self) -> None:
        """All were REDUCED, nobody AGREED: iteration 5 is computed again."""
        commit = resolve([record(5, IterationPhase.REDUCED), record(5, IterationPhase.COMPUTE)])
        assert (commit.iteration, commit.outcome, commit.replay, commit.entry) == (4, outcome(4), False, 5)
        assert commit.counters == counters(5)


class TestWhereToGoOn:
    @given(records=survivors())
    def test_replay_until_all_workers_in_the_loop_are_past(self, records: list[Record]) -> None:
        commit = resolve(records)
        behind = [r for r in records if r.works and r.iteration <= commit.iteration]
        nobody_in_loop = not any(r.works for r in records)
        assert commit.replay == (bool(behind) or nobody_in_loop)
        assert commit.entry == (commit.iteration if commit.replay else commit.iteration + 1)
        assert commit.counters == counters(commit.entry)

    @given(records=survivors())
    def test_who_is_reduced_gets_what_was_agreed(self, records: list[Record]) -> None:
        commit = resolve(records)
        j = commit.iteration
        for each in records:
            assert (each.iteration, each.stage) >= (j, IterationPhase.REDUCED), "would have to invent a gradient"
        if any((r.iteration, r.stage) == (j, IterationPhase.REDUCED) for r in records):
            assert commit.outcome is not None and commit.outcome.grad_norm == outcome(j).grad_norm

    def test_losses_by_name_are_preferred(self) -> None:
        """A standby knows the norm but not the losses' names."""
        commit = resolve([record(5, IterationPhase.AGREED, works=False), record(5, IterationPhase.STEPPED)])
        assert commit.outcome == outcome(5, named=True)
        commit = resolve([record(5, IterationPhase.STEPPED), record(5, IterationPhase.AGREED, works=False)])
        assert commit.outcome == outcome(5, named=True)

    def test_who_agreed_and_who_knows_the_names_may_be_different_workers(self) -> None:
        """A first stage has heard that all agreed, the last one has not: the log still gets the loss by name."""
        first, last = (
            record(5, IterationPhase.AGREED, works=False),
            replace(record(5, IterationPhase.REDUCED), loss_names=("lm loss",)),
        )
        last = replace(last, outcomes={})
        for records in ([first, last], [last, first]):
            commit = resolve(decode(Record, json.loads(json.dumps(encode(each)))) for each in records)
            assert commit.outcome is not None and commit.outcome.means == {"lm loss": 2.0}

    def test_counters_with_loss_totals_are_preferred(self) -> None:
        """First stages total no losses, standbys nothing at all; the log's averages need both sum and count."""
        totals: list[dict[str, object]] = [{}, {"advanced iterations": 3}, {"advanced iterations": 3, "lm loss": [9.5]}]
        records = [
            replace(record(5, IterationPhase.COMPUTE), counters={5: {**counters(5), "totals": each}}) for each in totals
        ]
        for order in permutations(records):
            assert resolve(order).counters["totals"] == totals[-1]

    def test_times_are_those_of_the_worker_whose_counters_are_taken(self) -> None:
        """Each worker has its own clock; all else is the same on all workers of a stage."""
        first = record(5, IterationPhase.COMPUTE)
        last = replace(first, counters={5: {**counters(5), "totals": {"lm loss": 1.0}}})
        for order in permutations([(first, 0.0), (first, 1.0), (last, 2.0)]):
            times = [{5: {"started": started}} for _, started in order]
            counted = resolve([each for each, _ in order], times=times).counters
            assert counted == {**counters(5), "totals": {"lm loss": 1.0}, "started": 2.0}

    def test_only_standbys_are_left(self) -> None:
        """Nobody can tell whether the last iteration was logged and saved: it is repeated, not its step."""
        commit = resolve(
            [record(5, IterationPhase.STEPPED, works=False), record(6, IterationPhase.COMPUTE, works=False)]
        )
        assert (commit.iteration, commit.replay, commit.counters) == (5, True, counters(5))

    def test_before_the_first_step(self) -> None:
        """The epoch holds before train() begins: the first iteration is computed again, nothing is agreed yet."""
        first = Record(1, IterationPhase.COMPUTE, True, {}, {1: counters(1)})
        commit = resolve([first, first])
        assert (commit.iteration, commit.outcome, commit.entry, commit.counters) == (0, None, 1, counters(1))

    def test_after_training_all_meet_in_the_earliest_call_that_somebody_is_in(self) -> None:
        """One saves, one evaluates already; what a standby is in does not count."""
        saving, evaluating = (replace(record(6, IterationPhase.COMPUTE), position=position) for position in (2, 3))
        standby = record(6, IterationPhase.COMPUTE, works=False)
        commit = resolve([evaluating, saving, standby])
        assert (commit.iteration, commit.replay, commit.position) == (5, False, 2)

    def test_who_has_left_train_comes_back_if_another_has_not(self) -> None:
        """Worker 1 has not finished the last iteration's log and checkpoint, which all do together."""
        commit = resolve([replace(record(6, IterationPhase.COMPUTE), position=1), record(5, IterationPhase.STEPPED)])
        assert (commit.iteration, commit.replay, commit.position) == (5, True, 0)

    def test_nobody_knows_the_counters(self) -> None:
        with pytest.raises(NoCommitError, match="at the start of iteration 5"):
            resolve([Record(5, IterationPhase.COMPUTE)])


class TestBinding:
    def test_a_commit_outlives_those_who_knew(self) -> None:
        """The last worker that had agreed on 5 dies in the recovery; the step that others took by then stays."""
        first = resolve([record(5, IterationPhase.AGREED), record(5, IterationPhase.REDUCED)])
        again = resolve([record(5, IterationPhase.REDUCED)], first)
        assert (again.iteration, again.outcome) == (5, outcome(5))

    def test_counters_of_the_commit_serve_where_survivors_have_none(self) -> None:
        bound = Commit(5, outcome(5), True, counters(5))
        assert resolve([Record(5, IterationPhase.STEPPED)], bound) == bound

    def test_progress_since_then_counts(self) -> None:
        bound = Commit(5, outcome(5), True, counters(5))
        commit = resolve([record(8, IterationPhase.COMPUTE)], bound)
        assert (commit.iteration, commit.outcome) == (7, outcome(7))

    @given(data=st.data())
    def test_a_sequence_of_recoveries_never_goes_back(self, data: st.DataObject) -> None:
        commit, last = None, 2
        for _ in range(data.draw(st.integers(1, 6))):
            last += data.draw(st.integers(0, 2))
            # Some of those that knew die on the way: what is left may know less than the commit.
            records = data.draw(survivors(last))
            left = data.draw(st.lists(st.sampled_from(records), min_size=1))
            after = resolve(left, commit)
            if commit is not None:
                assert after.iteration >= commit.iteration
                assert after.iteration > commit.iteration or after.outcome is not None or commit.outcome is None
            commit = after


class TestOnTheWire:
    @given(records=survivors())
    def test_records_and_commits_through_json(self, records: list[Record]) -> None:
        commit = resolve(records)
        assert decode(Commit, json.loads(json.dumps(encode(commit)))) == commit
        for each in records:
            assert decode(Record, json.loads(json.dumps(encode(each)))) == each

    def test_nothing_agreed_yet(self) -> None:
        commit = Commit(0, None, False, counters(1))
        assert decode(Commit, json.loads(json.dumps(encode(commit)))) == commit
