# SPDX-License-Identifier: Apache-2.0
"""How far this worker is: in its iteration, in Megatron's log, and in pretrain(). May import torch and `protocol`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from megatron_resihp.protocol.notices import ValidationOrder
from megatron_resihp.protocol.records import TIMES, Commit, IterationPhase, Outcome, Record, Times

NO_DOCUMENTS: Final = (0.0, 0.0)
"""Σ l and Σ l² of no documents."""
LOSS_SLOTS: Final = 16
"""How many named losses the agreement carries. All workers have to know before a step, also those that see none."""


class ContractBroken(RuntimeError):
    """A record contradicts what was agreed; going on could train another model, so the job ends."""


@dataclass
class Progress:
    """This worker's record (DESIGN contract 3) with what is needed to repeat an iteration; keeps two iterations.

    Attributes:
        iteration, stage: where it is.
        outcomes, counters: what was agreed on, and Megatron's counters before the iteration, by its number.
        losses: what the schedule returned in this iteration (only the last stage has any).
        loss_names: their names, as far as they are agreed on.
        fed: sample indices that this worker's loader handed to the model in this iteration.
        documents: Σ l and Σ l² of the documents of all workers, agreed on in the last step and not told Megatron yet.
        logits: the largest attention logits of this iteration, by layer and head, on all workers; None: not known yet,
            or not wanted.
        evaluated: those of an evaluation that this iteration's step counts, too; None: there was none.
        replay: the outcome of a step that is applied already; train_step returns it instead of computing.
    """

    iteration: int = 0
    stage: IterationPhase = IterationPhase.COMPUTE
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    counters: dict[int, dict[str, Any]] = field(default_factory=dict)
    losses: list[dict[str, torch.Tensor]] = field(default_factory=list)
    loss_names: tuple[str, ...] = ()
    fed: list[int] = field(default_factory=list)
    documents: tuple[float, float] = NO_DOCUMENTS
    logits: torch.Tensor | None = None
    evaluated: torch.Tensor | None = None
    replay: Outcome | None = None

    def begin(self, iteration: int, counters: dict[str, Any] | None) -> None:
        self.iteration, self.stage = iteration, IterationPhase.COMPUTE
        if counters is not None:
            self.counters[iteration] = counters
        for table in (self.outcomes, self.counters):
            for old in [n for n in table if n < iteration - 1 or n > iteration]:
                del table[old]

    def agreed(self, outcome: Outcome) -> None:
        self.outcomes[self.iteration] = outcome
        self.stage = IterationPhase.AGREED

    def owes(self, commit: Commit) -> bool:
        """Whether this worker has yet to take the committed step, with the gradients that it has reduced.

        Raises:
            ContractBroken: it can be at no state that the commit allows.
        """
        if self.iteration < commit.iteration:
            raise ContractBroken(f"this worker is in iteration {self.iteration}, before {commit.iteration}")
        if self.iteration > commit.iteration:
            return False
        if self.stage is IterationPhase.COMPUTE:
            raise ContractBroken(f"iteration {commit.iteration} was agreed on while this worker computed it")
        return self.stage is not IterationPhase.STEPPED

    def record(self, in_loop: bool, position: int) -> Record:
        """What the coordinator gets; loss totals become numbers, which waits for the device once."""
        counters = {n: _plain(counters) for n, counters in self.counters.items()}
        outcomes = dict(self.outcomes)
        return Record(self.iteration, self.stage, in_loop, outcomes, counters, position, self.loss_names)

    def times(self) -> Times:
        """What the coordinator gets besides."""
        return {n: {name: each[name] for name in TIMES if name in each} for n, each in self.counters.items()}


def _plain(counters: dict[str, Any]) -> dict[str, Any]:
    shared = {name: value for name, value in counters.items() if name not in TIMES}
    return {**shared, **{name: _numbers(counters[name]) for name in ("totals", "predicted")}}


def _numbers(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in table.items()}


@dataclass
class Tally:
    """What Megatron's log is about to say.

    Attributes:
        totals: Megatron's running loss totals as of the last log call.
        carried: those to go on from after a recovery; None: Megatron's own.
        flops: floating-point operations so far, as train() counts them.
    """

    totals: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, Any] | None = None
    flops: float = 0.0


@dataclass
class Calls:
    """The calls that pretrain() makes of all workers together: train(), then final saves and evaluations.

    Attributes:
        made: those calls, in order.
        position: number of the call that this worker is in or comes to next.
        in_loop: whether this worker runs Megatron's train() (False: a standby, or not there yet).
        checkpointing_context: pretrain's own.
    """

    made: list[Callable[[], Any]] = field(default_factory=list)
    position: int = 0
    in_loop: bool = False
    checkpointing_context: dict[str, Any] = field(default_factory=dict)


@dataclass
class Orders:
    """What the workers have agreed to do.

    Attributes:
        validation: micro-benchmarks that all workers begin after this step.
        change: whether all workers leave for another plan after this step.
        saves: number of the last order to write a checkpoint.
    """

    validation: ValidationOrder | None = None
    change: bool = False
    saves: int = 0
