"""Each worker's record of how far an iteration got, and what the survivors make of their records. Pure.

Iteration n is the n-th optimizer step of the job (1-based). A worker goes COMPUTE -> REDUCED -> AGREED -> STEPPED
within it; it is done with it when its record names iteration n + 1. Imports the standard library only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any


class Stage(IntEnum):
    """How far an iteration got on one worker.

    COMPUTE: forward, backward and gradient collectives are under way.
    REDUCED: the host has seen every gradient collective of this worker complete without an error.
    AGREED: the reduction over all workers has completed, so every worker was REDUCED.
    STEPPED: parameters, optimizer state and schedule have taken the step.
    """

    COMPUTE = 0
    REDUCED = 1
    AGREED = 2
    STEPPED = 3


@dataclass(frozen=True)
class Outcome:
    """What all workers agreed on for one iteration: enough for a worker that is only REDUCED to take the same step.

    Attributes:
        epoch: the epoch in which it was agreed.
        grad_norm: global gradient norm before clipping; None where Megatron would not compute it: the step is skipped.
        losses: of each loss the sum over the global batch and the number of tokens it was taken over.
        loss_names: their names; empty on a worker that computes no losses, which agrees on their numbers only.
        stop: somebody asked for an orderly end after this iteration.
        save: somebody asked for a checkpoint after this iteration.
        skipped: a gradient has overflowed; the step only moves the loss scale.
        experts: what mixtures of experts reported of their balance, summed over all workers; empty if there are none.
    """

    epoch: int
    grad_norm: float | None
    losses: tuple[tuple[float, float], ...] = ()
    loss_names: tuple[str, ...] = ()
    stop: bool = False
    skipped: bool = False
    experts: tuple[float, ...] = ()
    save: bool = False

    @property
    def means(self) -> dict[str, float]:
        """Each loss per token, by name."""
        pairs = zip(self.loss_names, self.losses, strict=False)
        return {name: total / max(tokens, 1.0) for name, (total, tokens) in pairs}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Outcome":
        losses = tuple((float(total), float(tokens)) for total, tokens in data["losses"])
        names, flags = tuple(data["loss_names"]), (bool(data["stop"]), bool(data["skipped"]))
        save = bool(data["save"])
        return cls(data["epoch"], data["grad_norm"], losses, names, *flags, tuple(data["experts"]), save)


@dataclass(frozen=True)
class Record:
    """What one survivor reports when an epoch broke.

    Attributes:
        iteration: the iteration it was in.
        stage: how far it got there.
        works: it runs Megatron's loop (False: a standby, which has nothing to do between steps).
        position: which of the calls it is in that all workers make together: 0 is train(), the others follow it.
        loss_names: what losses are called, if it knows.
        outcomes: agreed outcomes that it knows, of this iteration and the one before.
        counters: Megatron's counters as they were at the start of this iteration and of the one before.
    """

    iteration: int
    stage: Stage
    works: bool = True
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    counters: dict[int, dict[str, Any]] = field(default_factory=dict)
    position: int = 0
    loss_names: tuple[str, ...] = ()

    @property
    def applied(self) -> int:
        """The last iteration that this worker knows to be agreed by all."""
        return self.iteration if self.stage >= Stage.AGREED else self.iteration - 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "stage": self.stage.name,
            "works": self.works,
            "outcomes": {str(n): outcome.to_dict() for n, outcome in self.outcomes.items()},
            "counters": {str(n): counters for n, counters in self.counters.items()},
            "position": self.position,
            "loss_names": list(self.loss_names),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Record":
        return cls(
            iteration=data["iteration"],
            stage=Stage[data["stage"]],
            works=data["works"],
            outcomes={int(n): Outcome.from_dict(outcome) for n, outcome in data["outcomes"].items()},
            counters={int(n): counters for n, counters in data["counters"].items()},
            position=data["position"],
            loss_names=tuple(data["loss_names"]),
        )


@dataclass(frozen=True)
class Commit:
    """Where all survivors go on from; once decided it binds every later epoch.

    Attributes:
        iteration: j, the last iteration that counts as applied. Who is REDUCED at j takes the step with `outcome`.
        outcome: what was agreed for j; None if nobody had agreed on anything yet.
        replay: what Megatron does after step j (logging, evaluation, checkpoint) was not finished by all: repeat it.
        counters: Megatron's counters at the start of the iteration at which the loop is entered again.
        position: the earliest call of the run that a survivor is in (0: train()); earlier ones all have made.
    """

    iteration: int
    outcome: Outcome | None
    replay: bool
    counters: dict[str, Any]
    position: int = 0

    @property
    def entry(self) -> int:
        """The iteration at which Megatron's loop is entered again."""
        return self.iteration if self.replay else self.iteration + 1

    def to_dict(self) -> dict[str, Any]:
        outcome = None if self.outcome is None else self.outcome.to_dict()
        return {
            "iteration": self.iteration, "outcome": outcome, "replay": self.replay, "counters": self.counters,
            "position": self.position,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Commit":
        outcome = None if data["outcome"] is None else Outcome.from_dict(data["outcome"])
        return cls(data["iteration"], outcome, data["replay"], data["counters"], data["position"])


class NoCommitError(Exception):
    """The survivors' records do not determine where to go on."""


def resolve(records: Iterable[Record], bound: Commit | None = None) -> Commit:
    """Decide the last applied iteration from the survivors' records (DESIGN contract 3).

    Args:
        records: one per survivor.
        bound: the commit of an earlier recovery, which the result never falls behind.

    Raises:
        NoCommitError: if nobody knows the counters to go on from (no working survivor had entered the loop).
    """
    survivors = list(records)
    iteration = max([record.applied for record in survivors] + ([bound.iteration] if bound else []))
    in_loop = [record for record in survivors if record.works]
    replay = not in_loop or any(record.iteration <= iteration for record in in_loop)
    entry = iteration if replay else iteration + 1
    counters = _counters_of(entry, survivors)
    if counters is None and bound is not None and bound.iteration == iteration:
        return bound
    if counters is None:
        raise NoCommitError(f"no survivor knows the state of the run at the start of iteration {entry}")
    position = min((record.position for record in in_loop), default=0)
    return Commit(iteration, _outcome_of(iteration, survivors, bound), replay, counters, position)


def _counters_of(entry: int, survivors: list[Record]) -> dict[str, Any] | None:
    """The counters at the start of an iteration, by somebody who follows the loss totals if there is one."""
    known = [record.counters[entry] for record in survivors if entry in record.counters]
    return max(known, key=lambda counters: len(counters.get("totals", ())), default=None)


def _outcome_of(iteration: int, survivors: list[Record], bound: Commit | None) -> Outcome | None:
    """What was agreed for the iteration; who knows the losses by name may not have heard that all agreed."""
    known = [record.outcomes[iteration] for record in survivors if iteration in record.outcomes]
    if bound is not None and bound.iteration == iteration and bound.outcome is not None:
        known.append(bound.outcome)
    if not known:
        return None
    outcome = max(known, key=lambda outcome: len(outcome.loss_names))
    names = max((record.loss_names for record in survivors), key=len, default=())
    return outcome if outcome.loss_names else replace(outcome, loss_names=names)
