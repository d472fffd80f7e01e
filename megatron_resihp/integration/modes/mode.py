# SPDX-License-Identifier: Apache-2.0
"""The interface of a mode: how one worker runs a plan. There is one mode for each epoch, chosen as it begins.

May import torch, `plan`, `executor` and modules of this package that know no runtime.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_resihp.executor.gloo.groups_ahead import WorldGroup
from megatron_resihp.executor.groups.side_group import SideGroup
from megatron_resihp.integration.state.taking_over import unchanged
from megatron_resihp.integration.step.loss_scale import Averaging
from megatron_resihp.integration.step.optimizer_copy import ExpertCopy, Kept
from megatron_resihp.integration.trained import Trained
from megatron_resihp.integration.world.view import View
from megatron_resihp.plan import Shard
from megatron_resihp.protocol.published import EpochPlan
from megatron_resihp.protocol.records import Outcome

Losses = list[dict[str, Any]]
Schedule = Callable[..., Losses]
ParametersNorm = Callable[[Sequence[Any]], float]
"""The norm of the parameters of a model's chunks."""
DocumentCounts = tuple[float | None, float | None]
"""Σ l and Σ l² of packed documents' lengths; None: there are none."""


class Migrated(NamedTuple):
    """What the start of an epoch has brought to a worker.

    Attributes:
        received: bytes from others.
        digests: of its state before and after.
        kept: what of a distributed optimizer is then current here; None: no parts of it are.
        experts: the copy of another worker's experts that is kept here; None: none is.
        keeps_copies: whether those copies are kept that the plan asks for.
    """

    received: int
    digests: dict[str, str]
    kept: Kept | None = None
    experts: ExpertCopy | None = None
    keeps_copies: bool = True


class Counts(ABC):
    """What one worker counts of gradients and parameters; all workers together count each slice once."""

    @abstractmethod
    def norm_squared(self) -> float:
        """Sum of squares of the gradients that this worker counts."""

    @abstractmethod
    def zeros(self) -> int:
        """How many elements of these gradients are zero."""

    @abstractmethod
    def parameters_norm(self, original: ParametersNorm) -> float:
        """The norm of all parameters, as Megatron logs it in the job's own layout; all working workers call it
        together. `original`: Megatron's."""


class Mode(ABC):
    """How one worker runs a plan: groups, micro-batches, gradients and the step.

    Attributes:
        view: what this worker is under the plan.
        everybody: the group of all members, standbys included.
        averaging: by what losses and sums of gradients are divided.
        state: how its state is built, moved and saved.
        counts: what it counts of gradients and parameters, so that all workers together count each once.
        seen_documents: Σ l and Σ l² of the documents that this worker counts for all in this iteration; None where
            Megatron counts them.
        splits_backward: whether backward passes are run in two halves, B and W.
    """

    view: View
    everybody: SideGroup
    averaging: Averaging
    state: "ModeState"
    counts: Counts
    seen_documents: torch.Tensor | None = None
    splits_backward: bool = False

    # ---- groups

    def meet(self) -> None:  # noqa: B027 (most modes have nothing to agree on)
        """What all members, standbys included, settle together before the epoch's other groups are made."""

    @abstractmethod
    def wanted_groups(self) -> list[WorldGroup]:
        """The groups of gloo's in torch's world that this worker will make."""

    @abstractmethod
    def build_groups(self) -> None:
        """Make Megatron's groups in the plan's world, and start its random streams."""

    def close(self) -> None:
        """Let go of groups, which may be called twice; what else a mode says holds until the next one's epoch."""
        vars(self).pop("everybody", None)

    # ---- an iteration

    def begin_iteration(self) -> None:  # noqa: B027 (most modes have nothing to do)
        """What all members, standbys included, do together before an iteration that is computed."""

    @abstractmethod
    def train(self, schedule: Schedule, call: dict[str, Any]) -> Losses:
        """Run this worker's micro-batches.

        Args:
            schedule: Megatron's.
            call: what Megatron calls it with.

        Returns:
            what the loss function reported, on the last stage.
        """

    @abstractmethod
    def evaluate(self, schedule: Schedule, call: dict[str, Any]) -> Losses:
        """Run micro-batches forwards; arguments and result as of `train`."""

    @abstractmethod
    def share_gradients(self) -> None:
        """Sum gradients, or give them to the workers that keep them current; all members call it once per step."""

    def nccl_failed(self) -> None:  # noqa: B027 (most modes have no other way)
        """NCCL is in error, as it says in the background. Called from any thread."""

    def step(self, optimizer: Any) -> None:
        """Take the optimizer's step with clipped gradients; communicates nothing."""
        optimizer.step_with_ready_grads()

    def after_step(self) -> None:  # noqa: B027 (most modes have nothing to do)
        """What all working workers do together once they have taken a step."""

    def replicas_agree(self, megatrons: Callable[[], bool]) -> bool:
        """Whether replicas have the same parameters; all working workers ask. `megatrons`: its own check of that."""
        return megatrons()

    @abstractmethod
    def losses(self, found: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
        """The mean losses of an iteration. `found`: Megatron's."""

    @abstractmethod
    def consume_documents(self, original: Callable[[], DocumentCounts]) -> DocumentCounts:
        """The documents of the iteration, once. `original`: Megatron's count of them."""


class ModeState(ABC):
    """How a worker's state is built, moved, compared and saved under a plan."""

    checkpoint_metadata: dict[str, Any]
    """What a checkpoint's metadata says besides Megatron's."""

    @abstractmethod
    def build_model(self, call: partial[Any]) -> Any:
        """This worker's chunks. `call`: of Megatron's builder."""

    def succeeds(self, held: Sequence[Shard], wanted: Sequence[Shard]) -> dict[int, int]:
        """Number of a new chunk → number of the old one whose memory it can take over."""
        return unchanged(held, wanted)

    @abstractmethod
    def migrate(self, order: EpochPlan, trained: Trained) -> Migrated:
        """Fill new objects, from the old ones or from other holders; all members call it.

        Args:
            trained: the new objects, or the live ones where nothing is to be filled.

        Raises:
            ContractBroken: what this worker has kept is not what it was.
            RuntimeError: some state is nowhere any more.
        """

    def first_copies(self) -> Migrated:
        """What is current here as the job begins besides the training objects; all members call it."""
        return Migrated(0, {})

    @abstractmethod
    def digests(self, trained: Trained) -> dict[str, str]:
        """Digests of what the plan gives this worker or lets it keep."""

    def is_loadable(self) -> bool:
        """Whether Megatron could go on from what would be saved now; all working workers ask together."""
        return True

    @abstractmethod
    def saving(self) -> AbstractContextManager[str]:
        """Let Megatron save in a format that fits the plan, whose name is yielded."""

    @abstractmethod
    def state_dict(self, call: partial[dict[str, Any]]) -> dict[str, Any]:
        """What this worker writes into a checkpoint. `call`: of Megatron's generate_state_dict."""
