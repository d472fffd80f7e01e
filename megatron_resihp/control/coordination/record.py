# SPDX-License-Identifier: Apache-2.0
"""What the survivors of an epoch make of their records (`protocol.records`). Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_resihp.protocol.logs import Place
from megatron_resihp.protocol.records import Commit, Outcome, Record, Times


class NoCommitError(Exception):
    """The survivors' records do not determine where to go on."""


def resolve(
    records: Iterable[Record], bound: Commit | None = None, logged: Place | None = None, times: Sequence[Times] = ()
) -> Commit:
    """Decide the last applied iteration from the survivors' records (DESIGN contract 3).

    Args:
        records: one per survivor.
        bound: the commit of an earlier recovery, which the result never falls behind.
        logged: the last page of the log that has come; None: no logs are wanted.
        times: of each survivor, in the same order; none at all: nobody has told them.

    Raises:
        NoCommitError: if no worker knows the counters to go on from (no working survivor had entered the loop).
    """
    everyone = list(records)
    # Thousands have one and the same: what follows depends on which there are, and on which comes first.
    survivors = list({id(record): record for record in everyone}.values())
    iteration = max([record.applied for record in survivors] + ([bound.iteration] if bound else []))
    in_loop = [record for record in survivors if record.works]
    outcome = _outcome_of(iteration, survivors, bound)
    # The worker that logs may have died when all others had finished the iteration.
    unlogged = logged is not None and outcome is not None and logged < Place(0, iteration)
    unlogged = unlogged and _who_counts(iteration, survivors) is not None
    replay = unlogged or not in_loop or any(record.iteration <= iteration for record in in_loop)
    entry = iteration if replay else iteration + 1
    best = _who_counts(entry, survivors)
    if best is None and bound is not None and bound.iteration == iteration:
        return bound
    if best is None:
        raise NoCommitError(f"no survivor knows the state of the run at the start of iteration {entry}")
    position = min((record.position for record in in_loop), default=0)
    if logged is not None:
        position = 0 if unlogged else min(position, logged.call + 1)
    its_times = next((told.get(entry, {}) for record, told in zip(everyone, times, strict=False) if record is best), {})
    return Commit(iteration, outcome, replay, {**best.counters[entry], **its_times}, position)


def _who_counts(entry: int, survivors: list[Record]) -> Record | None:
    """Who knows the counters at the start of an iteration; a worker that follows the loss totals if there is one."""
    known = [record for record in survivors if entry in record.counters]
    return max(known, key=lambda record: len(record.counters[entry].get("totals", ())), default=None)


def _outcome_of(iteration: int, survivors: list[Record], bound: Commit | None) -> Outcome | None:
    """What was agreed for the iteration; a worker that knows the losses by name may not have heard that all agreed."""
    known = [record.outcomes[iteration] for record in survivors if iteration in record.outcomes]
    if bound is not None and bound.iteration == iteration and bound.outcome is not None:
        known.append(bound.outcome)
    if not known:
        return None
    outcome = max(known, key=lambda outcome: len(outcome.loss_names))
    names = max((record.loss_names for record in survivors), key=len, default=())
    return outcome if outcome.loss_names else replace(outcome, loss_names=names)
