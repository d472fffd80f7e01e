# SPDX-License-Identifier: Apache-2.0
"""What the survivors of an epoch make of their records (`protocol.records`). Pure."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron_resihp.protocol.logs import Place
from megatron_resihp.protocol.records import Commit, Outcome, Record


class NoCommitError(Exception):
    """The survivors' records do not determine where to go on."""


def resolve(records: Iterable[Record], bound: Commit | None = None, logged: Place | None = None) -> Commit:
    """Decide the last applied iteration from the survivors' records (DESIGN contract 3).

    Args:
        records: one per survivor.
        bound: the commit of an earlier recovery, which the result never falls behind.
        logged: the last page of the log that has come; None: no logs are wanted.

    Raises:
        NoCommitError: if no worker knows the counters to go on from (no working survivor had entered the loop).
    """
    survivors = list(records)
    iteration = max([record.applied for record in survivors] + ([bound.iteration] if bound else []))
    in_loop = [record for record in survivors if record.works]
    outcome = _outcome_of(iteration, survivors, bound)
    # The worker that logs may have died when all others had finished the iteration.
    unlogged = logged is not None and outcome is not None and logged < Place(0, iteration)
    unlogged = unlogged and _counters_of(iteration, survivors) is not None
    replay = unlogged or not in_loop or any(record.iteration <= iteration for record in in_loop)
    entry = iteration if replay else iteration + 1
    counters = _counters_of(entry, survivors)
    if counters is None and bound is not None and bound.iteration == iteration:
        return bound
    if counters is None:
        raise NoCommitError(f"no survivor knows the state of the run at the start of iteration {entry}")
    position = min((record.position for record in in_loop), default=0)
    if logged is not None:
        position = 0 if unlogged else min(position, logged.call + 1)
    return Commit(iteration, outcome, replay, counters, position)


def _counters_of(entry: int, survivors: list[Record]) -> dict[str, Any] | None:
    """The counters at the start of an iteration, by a worker that follows the loss totals if there is one."""
    known = [record for record in survivors if entry in record.counters]
    best = max(known, key=lambda record: len(record.counters[entry].get("totals", ())), default=None)
    return None if best is None else best.counters_at(entry)


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
