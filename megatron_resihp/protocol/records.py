# SPDX-License-Identifier: Apache-2.0
"""How far an iteration got on each worker, and where survivors go on from.

Iteration n is the n-th optimizer step of the job (1-based). A worker goes COMPUTE -> REDUCED -> AGREED -> STEPPED
within it; it is done with it when its record names iteration n + 1. What survivors make of their records is decided in
`control.coordination.record`. May import `coding` and this package's types of fields.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Final

from megatron_resihp.coding import Holds
from megatron_resihp.protocol.values import Epoch, Natural


def _have_totals(counters: dict[str, Any]) -> bool:
    return isinstance(counters.get("totals", {}), dict | list)


Counters = Annotated[dict[str, Any], Holds(_have_totals, "counters: their 'totals' are a list or an object")]
"""Megatron's, by name; those of workers that follow the losses have their `totals`."""
TIMES: Final[tuple[str, ...]] = ("interval_s", "started")
"""Counters that each worker has by its own clock: seconds that the next line of Megatron's log is about, and the Unix
time at which it was started."""
Times = dict[Natural, dict[str, Any]]
"""Iteration → a worker's TIMES at its start."""


class IterationPhase(IntEnum):
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
        stop: some worker was asked for an orderly end after this iteration.
        save: some worker was asked for a checkpoint after this iteration.
        zeros: how many elements of the gradient are zero; None where that is not counted.
        skipped: a gradient has overflowed; the step only moves the loss scale.
        experts: what mixtures of experts reported of their balance, summed over all workers; empty if there are none.
        predictions: what was reported of predictions of further tokens, summed over the global batch; empty if there
            are none.
        attention_logit: the largest one, as Megatron logs it; None where nobody asks for it.
    """

    epoch: Epoch
    grad_norm: float | None
    losses: tuple[tuple[float, float], ...] = ()
    loss_names: tuple[str, ...] = ()
    stop: bool = False
    skipped: bool = False
    experts: tuple[float, ...] = ()
    save: bool = False
    zeros: int | None = None
    predictions: tuple[float, ...] = ()
    attention_logit: float | None = None

    @property
    def means(self) -> dict[str, float]:
        """Each loss per token, by name."""
        pairs = zip(self.loss_names, self.losses, strict=False)
        return {name: total / max(tokens, 1.0) for name, (total, tokens) in pairs}


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
        counters: Megatron's counters as they were at the start of this iteration and of the one before, but for TIMES.
            So the records of a stage's workers are alike, and the coordinator need not read each.
    """

    iteration: Natural
    stage: IterationPhase
    works: bool = True
    outcomes: dict[Natural, Outcome] = field(default_factory=dict)
    counters: dict[Natural, Counters] = field(default_factory=dict)
    position: Natural = 0
    loss_names: tuple[str, ...] = ()

    @property
    def applied(self) -> int:
        """The last iteration that this worker knows to be agreed by all."""
        return self.iteration if self.stage >= IterationPhase.AGREED else self.iteration - 1


@dataclass(frozen=True)
class Commit:
    """Where all survivors go on from; once decided it binds every later epoch.

    Attributes:
        iteration: j, the last iteration that counts as applied. A worker that is REDUCED at j steps with `outcome`.
        outcome: what was agreed for j; None if none had agreed on anything yet.
        replay: what Megatron does after step j (logging, evaluation, checkpoint) was not finished by all: repeat it.
        counters: Megatron's counters at the start of the iteration at which the loop is entered again.
        position: the earliest call of the run that a survivor is in (0: train()); all have made the earlier ones.
    """

    iteration: Natural
    outcome: Outcome | None
    replay: bool
    counters: Counters
    position: Natural = 0

    @property
    def entry(self) -> int:
        """The iteration at which Megatron's loop is entered again."""
        return self.iteration if self.replay else self.iteration + 1
